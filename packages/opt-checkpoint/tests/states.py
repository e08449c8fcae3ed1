"""Small states for tests: what a rank saves at a step, known without the code under test."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opt_checkpoint import LocalNonpersistentObject, ShardedObject, ShardedTensor, load, read_index, sharded_like

ROWS = 12
COLUMNS = 40
LARGE_NUMEL = 70_001


def whole_at(step: int) -> Tensor:
    """The global tensor `w` at a step."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + 1000 * step


def large_at(step: int) -> Tensor:
    """The tensor `large` at a step: more than what is gathered before it is written, held by rank 0 alone."""
    return torch.full((LARGE_NUMEL,), float(step))


def state_at(step: int, rank: int, size: int, *, filled: bool = True) -> dict[str, Any]:
    """Rank `rank` of `size` holds a flat range of `w`, a replica of `b`, an object of its own, and common values."""
    numel = ROWS * COLUMNS
    start = rank * numel // size
    stop = (rank + 1) * numel // size
    data = whole_at(step).reshape(-1)[start:stop].clone()
    bias = torch.full((5,), float(step))
    if not filled:
        data = torch.full_like(data, -1)
        bias = torch.full_like(bias, -1)
    shape = (ROWS, COLUMNS)
    large = large_at(step) if filled else torch.full((LARGE_NUMEL,), -1.0)
    return {
        "large": ShardedTensor.from_rank_offsets("large", large) if rank == 0 else LocalNonpersistentObject(None),
        "w": ShardedTensor("w", data, torch.float32, shape, shape, (0, 0), None, flattened_range=slice(start, stop)),
        "b": ShardedTensor("b", bias, torch.float32, (5,), (5,), (0,), None, replica_id=rank),
        "rng": ShardedObject("rng", {"seed": step * 10} if filled else None, (1,), (0,), replica_id=rank),
        "step": step if filled else None,
        "groups": [{"lr": 0.1 * step, "betas": (0.9, 0.95)}] if filled else None,
    }


def assert_is_step(loaded: dict[str, Any], step: int, rank: int, size: int) -> None:
    """What `load` put together is bit-equal to what rank `rank` of `size` holds at a step."""
    expected = state_at(step, rank, size)
    assert torch.equal(loaded["w"], expected["w"].data)
    assert torch.equal(loaded["b"], expected["b"].data)
    assert rank or torch.equal(loaded["large"], large_at(step))
    assert loaded["rng"] == {"seed": step * 10}
    assert loaded["step"] == step
    assert loaded["groups"] == expected["groups"]


def whole_tensors(path: Path, prefix: str = "", **options: Any) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose keys begin with `prefix`, whole, as one process loads them."""
    stored = {key: tensor for key, tensor in read_index(path).tensors.items() if key.startswith(prefix)}
    found = {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in stored.items()}
    load({key: sharded_like(key, target) for key, target in found.items()}, path, **options)
    return found
