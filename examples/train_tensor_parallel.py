"""Megatron-style tensor parallelism: train on TP 2 x DP 2, resume on TP 1 x DP 4, or on any other sizes.

    torchrun --nproc-per-node 4 examples/train_tensor_parallel.py --tp 2 --steps 20
    torchrun --nproc-per-node 4 examples/train_tensor_parallel.py --tp 1 --steps 40
    python examples/train_tensor_parallel.py --steps 60

Each rank creates its part of every matrix and marks it as Megatron-Core does. The process groups are given once, to
`get_optimizer`; the checkpoint then holds whole matrices, which every layout can read.
"""

import argparse
import sys

import torch
import torch.distributed as dist
from ranks import join_ranks
from torch import Tensor, nn

from opt_checkpoint import CheckpointManager, sharded_model
from opt_stack import OptimizerConfig, ProcessGroups, get_optimizer

DIM = 16
FFN = 64
BATCH = 32


class Copied(torch.autograd.Function):
    """The same input on every tensor-parallel rank; the gradient is the sum over these ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: dist.ProcessGroup) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.tp)
        return grad, None


class Summed(torch.autograd.Function):
    """The sum of all tensor-parallel ranks' parts; each part gets the gradient of the sum."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=tp)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Mlp(nn.Module):
    """A matrix whose rows are cut, and one whose columns are cut; norm and last bias are the same on every rank."""

    def __init__(self, tp: dist.ProcessGroup):
        super().__init__()
        self.tp = tp
        self.norm = nn.LayerNorm(DIM)
        self.up = self._part((FFN, DIM), 0)
        self.up_bias = self._part((FFN,), 0)
        self.down = self._part((DIM, FFN), 1)
        self.down_bias = nn.Parameter(torch.zeros(DIM))

    def _part(self, shape: tuple[int, ...], dim: int) -> nn.Parameter:
        whole = 0.1 * torch.randn(shape)  # the same on every rank, so that each layout starts from the same model
        param = nn.Parameter(whole.chunk(dist.get_world_size(self.tp), dim)[dist.get_rank(self.tp)].contiguous())
        param.tensor_model_parallel = True
        param.partition_dim = dim
        return param

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(Copied.apply(self.norm(x), self.tp) @ self.up.T + self.up_bias)
        return x + Summed.apply(hidden @ self.down.T, self.tp) + self.down_bias


def make_groups(tp_size: int) -> ProcessGroups:
    """Ranks of one tensor-parallel group are neighbours."""
    world = dist.get_world_size()
    rank = dist.get_rank()
    tp = [dist.new_group(list(range(i, i + tp_size))) for i in range(0, world, tp_size)][rank // tp_size]
    dp = [dist.new_group(list(range(i, world, tp_size))) for i in range(tp_size)][rank % tp_size]
    return ProcessGroups(dp=dp, expt_dp=dp, tp=tp, mp=tp, tp_ep_pp=tp, intra_dist_opt=dist.group.WORLD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks; the others are data-parallel")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dir", default="runs/tensor_parallel")
    args = parser.parse_args()

    join_ranks()
    if dist.get_world_size() % args.tp:
        sys.exit(f"--tp {args.tp} does not divide the {dist.get_world_size()} ranks")
    torch.manual_seed(0)
    groups = make_groups(args.tp)
    model = nn.Sequential(*(Mlp(groups.tp) for _ in range(2)))
    config = OptimizerConfig(lr=3e-3, clip_grad=1.0, use_distributed_optimizer=True)  # ZeRO-1 over dp
    optimizer = get_optimizer(config, [model], pg_collection=groups)

    def everything(step: int) -> dict:
        weights = sharded_model(model)
        return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights), "step": step}

    manager = CheckpointManager(args.dir, keep=2)
    first = 0
    if manager.latest() is not None:
        state = manager.load(everything(0)).state
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    if first >= args.steps:
        sys.exit(f"{args.dir} has a checkpoint of step {first} already; pass more --steps, or another --dir")

    replicas = dist.get_world_size(groups.dp)
    replica = dist.get_rank(groups.dp)
    for step in range(first, args.steps):
        x = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(step)).chunk(replicas)[replica]
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    manager.save(args.steps, everything(args.steps))
    manager.close()
    total = loss.detach()
    dist.all_reduce(total, group=groups.dp)
    if dist.get_rank() == 0:
        print(f"TP {args.tp} x DP {replicas}: steps {first} to {args.steps}, loss {total.item() / replicas:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
