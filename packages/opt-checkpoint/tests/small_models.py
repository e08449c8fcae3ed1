"""A small network of torch and its AdamW, for tests of what becomes of an optimizer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer


def network(seed: int = 1, *, rows: int = 7) -> nn.Sequential:
    """Two matrices and two vectors."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, rows), nn.Tanh(), nn.Linear(rows, 3))


def grouped(model: nn.Module, *, lr: float = 0.05) -> AdamW:
    """A group of the matrices and one of the vectors."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": lr / 2}]
    return AdamW(groups, lr=lr)


def train(model: nn.Module, optimizer: Optimizer, start: int, stop: int) -> list[float]:
    """The losses of some steps, on the same data on every rank, so that all sharded ways compute the same."""
    losses = []
    for step in range(start, stop):
        data = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
        loss = model(data).square().sub(0.3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(steps: int = 2) -> tuple[nn.Sequential, AdamW]:
    """A network with two groups of parameters, after some steps."""
    model = network()
    optimizer = grouped(model)
    train(model, optimizer, 0, steps)
    return model, optimizer


def stepped(model: nn.Module, *, named: bool = False, **options: Any) -> AdamW:
    """An optimizer of one group after a step."""
    optimizer = AdamW(model.named_parameters() if named else model.parameters(), **options)
    train(model, optimizer, 0, 1)
    return optimizer


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by the names of parameters."""
    return {name: optimizer.state.get(param, {}) for name, param in model.named_parameters()}


def assert_same_state(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> None:
    """States by parameter and name are equal bit by bit, in equal dtypes."""
    assert {n: set(s) for n, s in a.items()} == {n: set(s) for n, s in b.items()}
    assert all(torch.equal(a[n][k], b[n][k]) and a[n][k].dtype == b[n][k].dtype for n in a for k in a[n])


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
