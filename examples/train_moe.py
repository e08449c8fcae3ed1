"""A mixture of experts: dense layers on every rank, each expert on one rank only, one optimizer over both.

    torchrun --nproc-per-node 2 examples/train_moe.py --steps 60

Ranks are expert-parallel: tokens are sent to their expert and back. Expert parameters have separate process groups, and
each is counted once in the gradient norm. With plain `python` there is one rank, with one expert.
"""

import argparse
import warnings

import torch
import torch.distributed as dist
from ranks import join_ranks
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather, all_reduce

from opt_config import OptimizerConfig
from opt_stack import ProcessGroups, get_optimizer

DIM = 32
TOKENS = 256
# torch 2.13 deprecates the collectives that autograd knows in favour of a module that is still private.
warnings.filterwarnings("ignore", "torch.distributed.nn.functional", FutureWarning)


class Experts(nn.Module):
    """One expert on each rank. A token goes to the expert with the largest gate weight, which scales its output."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, dist.get_world_size(), bias=False)
        with torch.random.fork_rng(devices=[]):  # the layers after this one are the same on every rank again
            torch.manual_seed(100 + dist.get_rank())  # each rank has its own expert
            self.expert = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        for param in self.expert.parameters():
            param.allreduce = False  # Megatron-Core's attribute of experts: not averaged with the dense parameters

    def forward(self, x: Tensor) -> Tensor:  # (tokens, DIM) of this rank
        rank = dist.get_rank()
        all_tokens = torch.cat(all_gather(x))
        weights = self.gate(all_tokens).softmax(-1)
        is_local = weights.argmax(-1) == rank
        out = torch.zeros_like(all_tokens)
        out[is_local] = weights[is_local, rank, None] * self.expert(all_tokens[is_local])
        return all_reduce(out).chunk(dist.get_world_size())[rank]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps

    join_ranks()
    rank = dist.get_rank()
    world = dist.group.WORLD
    torch.manual_seed(0)  # dense layers are the same on every rank

    model = nn.Sequential(nn.Linear(8, DIM), Experts(), nn.LayerNorm(DIM), nn.Linear(DIM, 1))
    groups = ProcessGroups(
        dp=world,  # dense parameters: a copy on every rank
        expt_dp=None,  # each expert: one copy in all
        mp=None,  # one rank holds all dense parameters
        tp_ep_pp=world,  # all ranks together hold the experts
        ep=world,
    )
    optimizer = get_optimizer(OptimizerConfig(lr=3e-3, clip_grad=1.0), [model], pg_collection=groups)
    if rank == 0:
        print(optimizer.plan)

    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        x = torch.randn(TOKENS, 8, generator=generator)
        loss = (
            (model(x) - torch.where(x[:, :1] > 0, x.square().sum(1, keepdim=True), -x.sum(1, keepdim=True)))
            .square()
            .mean()
        )
        loss.backward()
        result = optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.2f}, norm {result.grad_norm:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
