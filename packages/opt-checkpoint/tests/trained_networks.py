"""A small network under wrappers of torch, its optimizers, and their saved states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from opt_checkpoint import (
    save,
    sharded_optimizer,
)

STEPS = 3


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.LayerNorm(3))


def grouped(model: nn.Module, *, lr: float = 0.05) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": lr / 2}]
    return torch.optim.AdamW(groups, lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> list[float]:
    """The same data on every rank, so that all sharded ways compute the same."""
    losses = []
    for step in range(start, stop):
        data = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
        loss = model(data).square().sub(0.3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def wrap(kind: str, model: nn.Module, size: int) -> nn.Module:
    if kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    elif kind == "ddp":
        return DistributedDataParallel(model)
    return model


def two_linears(mesh: DeviceMesh | None, *, rows: int = 8) -> nn.Module:
    """Plain, under FSDP2 on a mesh of one axis, or tensor-parallel on the second of two."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, rows), nn.Tanh(), nn.Linear(rows, 3))
    if mesh is not None and mesh.ndim == 2:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if mesh is not None:
        fully_shard(model, mesh=mesh if mesh.ndim == 1 else mesh["dp"])
    return model


def mesh_of(size: int) -> DeviceMesh | None:
    if size == 4:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (size,)) if size > 1 else None


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> Path:
    save({"optimizer": sharded_optimizer(model, optimizer)}, path)
    return path


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {n: optimizer.state.get(p, {}) for n, p in model.named_parameters()}


def assert_same_state(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert {n: set(s) for n, s in a.items()} == {n: set(s) for n, s in b.items()}
    assert all(torch.equal(a[n][k], b[n][k]) and a[n][k].dtype == b[n][k].dtype for n in a for k in a[n])


class Holder(nn.Module):
    """A module under the name `name`, and a parameter `weight` next to it if asked for."""

    def __init__(self, name: str, child: nn.Module, *, weight: bool = False) -> None:
        super().__init__()
        self.add_module(name, child)
        if weight:
            self.weight = nn.Parameter(torch.ones(2, 2))
