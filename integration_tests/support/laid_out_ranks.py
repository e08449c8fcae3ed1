"""Rank programs for the tests of DTensor parameters and of faults; importable, so that spawned processes find them."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import ProcessGroups
from opt_stack import get_optimizer

STEPS = 3


class Mlp(nn.Module):
    """Matrices and vectors; 6 and 13 rows, so that one of two ranks stores less of some."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(11)
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 6)
        self.out = nn.Linear(6, 13, bias=False)
        self.out.weight.is_embedding_or_output_parameter = True
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.rand(param.shape, generator=generator) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x))))).square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[float]
    inf_norm: float
    state_bytes: int


def train_whole(config: OptimizerConfig) -> Trained:
    """One process, the joined batch."""
    return _train(config, Mlp(), lambda step: batch(step))


def train_fsdp(config: OptimizerConfig) -> Trained:
    """One rank: the model sharded by torch, its part of the batch."""
    model = Mlp()
    fully_shard(model.first)
    fully_shard(model)
    return _train(config, model, lambda step: batch(step).chunk(dist.get_world_size())[dist.get_rank()])


def _train(config: OptimizerConfig, model: nn.Module, batch_of: Any) -> Trained:
    for name, param in model.named_parameters():
        if name == "out.weight":  # sharding makes new parameters, without the old ones' attributes
            param.is_embedding_or_output_parameter = True
    optimizer = get_optimizer(config, [model], {})
    norms, largest = [], 0.0
    for step in range(STEPS):
        model(batch_of(step)).backward()
        assert not optimizer.prepare_grads()
        largest = optimizer.get_grad_norm(float("inf"))
        norms.append(optimizer.get_grad_norm())
        assert optimizer.step_with_ready_grads()
        optimizer.zero_grad()
    weights = {name: _full(param) for name, param in model.named_parameters()}
    return Trained(weights, norms, largest, sum(unit.state_bytes() for unit in optimizer.stepper.units))


def _full(param: Tensor) -> Tensor:
    found = param.detach()
    return found.full_tensor() if isinstance(found, dist.tensor.DTensor) else found.clone()


# --- faults ----------------------------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    error: str
    changed: bool  # any weight


def raise_in_backward(wrapped: bool) -> Outcome:
    """The last rank raises in its second backward pass; the other proceeds to its step."""
    group = dist.new_group()
    groups = ProcessGroups(dp=group, expt_dp=group, mp=None, tp_ep_pp=None, intra_dist_opt=group)
    net = Mlp()
    model: nn.Module = net
    if wrapped:
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(ddp, net, groups=groups)
    config = OptimizerConfig(lr=0.1, use_distributed_optimizer=True)
    optimizer = get_optimizer(config, [model], {}, pg_collection=groups)
    before = None
    try:
        for step in range(2):
            before = [p.detach().clone() for p in net.parameters()]
            loss = model(batch(step))
            if step == 1 and dist.get_rank() == 1:
                raise RuntimeError("no memory left on this rank")
            loss.backward()
            optimizer.step()
            if wrapped:
                model.zero_grad_buffer()
            optimizer.zero_grad()
    except Exception as error:
        changed = any(not torch.equal(a, b) for a, b in zip(before or (), net.parameters(), strict=True))
        return Outcome(f"{type(error).__name__}: {error}", changed)
    return Outcome("", True)


def config(rule: str, **changes: Any) -> OptimizerConfig:
    # Not clipped: norms are summed in another order.
    base = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0, "muon_fp32_matmul_prec": "highest"}
    return OptimizerConfig(optimizer=rule, **{**base, **changes})
