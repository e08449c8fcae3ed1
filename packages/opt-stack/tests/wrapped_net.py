"""A small model with two families of parameters for tests of wrapped chunks, its batches and a reference run."""

from collections.abc import Iterable
from typing import Any

import torch
from stack_models import over
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.comm import Comm
from opt_stack import DistributedDataParallel

WIDTH = 6
LR = 0.1


class Net(nn.Module):
    """Matrices, and a norm that is flagged as an expert, so that a wrapper has two buffers; equal on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        numbers = torch.Generator().manual_seed(0)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=numbers) / 2
        for param in self.norm.parameters():
            param.allreduce = False  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x)))
        return y


def wrap(comm: Comm, **fields: Any) -> DistributedDataParallel:
    """A sharded `Net`, unless `fields` say otherwise."""
    config = DistributedDataParallelConfig(**{"use_distributed_optimizer": True, **fields})
    return DistributedDataParallel(config, Net(), groups=over(comm))


def inputs(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def trained_alone(names: tuple[str, ...], steps: int) -> dict[str, Tensor]:
    """torch's SGD on the joined batch; parameters that are not in `names` stay."""
    net = Net()
    optimizer = torch.optim.SGD([param for name, param in net.named_parameters() if name in names], lr=LR)
    for step in range(steps):
        net.zero_grad()
        backward(loss_of(net, inputs(step)))
        optimizer.step()
    return {name: param.detach().clone() for name, param in net.named_parameters()}


def groups_of(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Experts in a group of their own."""
    by_family: dict[bool, list[nn.Parameter]] = {}
    for param in params:
        by_family.setdefault(getattr(param, "allreduce", True), []).append(param)
    return [{"params": same} for same in by_family.values()]


def sgd(**changes: Any) -> OptimizerConfig:
    fields = {"optimizer": "sgd", "lr": LR, "weight_decay": 0.0, "sgd_momentum": 0.0, "clip_grad": 0.0}
    return OptimizerConfig(**{**fields, "use_distributed_optimizer": True, **changes})
