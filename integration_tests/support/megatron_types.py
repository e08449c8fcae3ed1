"""Stand-ins for Megatron-Core's sharded types, with a `save` and a `load` of its `dist_checkpointing` in memory."""

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

ABSENT: Any = object()
NAME = "megatron.core.dist_checkpointing.mapping"


@dataclass
class ShardedTensor:
    key: str
    data: Tensor
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: Any = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def place(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + n) for o, n in zip(self.global_offset, self.local_shape, strict=True))


@dataclass
class ShardedTensorFactory:
    key: str
    data: Tensor
    build_fn: Any
    merge_fn: Any
    replica_id: Any = 0
    flattened_range: slice | None = None


@dataclass
class ShardedObject:
    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: Any = 0


class LocalNonpersistentObject:
    def __init__(self, obj: Any):
        self.obj = obj


TYPES = (ShardedTensor, ShardedTensorFactory, ShardedObject, LocalNonpersistentObject)


def install(monkeypatch: Any) -> None:
    """Make the stand-ins Megatron-Core's."""
    module = ModuleType(NAME)
    for cls in TYPES:
        monkeypatch.setattr(cls, "__module__", NAME)
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, NAME, module)


class Saved(NamedTuple):
    tensors: dict[str, Tensor]
    common: dict[str, Any]  # the plain values of rank 0


def save(states: Sequence[dict[str, Any]]) -> Saved:
    """Save the states of all ranks; every element is written once."""
    tensors: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}
    for value in (value for state in states for value in _sharded(state)):
        assert isinstance(value, ShardedTensor)
        assert value.flattened_range is None, "Megatron-Core has no flat ranges"
        assert value.prepend_axis_num == 0 or value.axis_fragmentations, "it loses prepended axes of uneven blocks"
        whole = tensors.setdefault(value.key, torch.zeros(value.global_shape, dtype=value.dtype))
        count = written.setdefault(value.key, torch.zeros(value.global_shape, dtype=torch.int64))
        assert (whole.dtype, whole.shape) == (value.dtype, value.global_shape)
        is_main = value.replica_id == 0 or not any(value.replica_id)
        if is_main:
            whole[value.place()] = value.data
            count[value.place()] += 1
    for key, count in written.items():
        assert count.eq(1).all(), key
    return Saved(tensors, copy.deepcopy(_plain(states[0])))


def load(saved: Saved, state: dict[str, Any]) -> Any:
    """Load into the tensors of one rank's state, and return it with the saved plain values."""
    loaded = _merged(_filled(state, saved), copy.deepcopy(saved.common))
    return loaded if loaded is not None else {}


def _sharded(state: Any) -> list[Any]:
    if isinstance(state, dict | list):
        values = state.values() if isinstance(state, dict) else state
        return [found for value in values for found in _sharded(value)]
    return [state] if isinstance(state, ShardedTensor) else []


def _plain(state: Any) -> Any:
    """The values that are not sharded; ABSENT where there are none."""
    if isinstance(state, dict) and state:
        found = {key: _plain(value) for key, value in state.items()}
        return {key: value for key, value in found.items() if value is not ABSENT} or ABSENT
    return ABSENT if isinstance(state, TYPES) else state


def _filled(state: Any, saved: Saved) -> Any:
    """The loaded tensors and local values of a state."""
    if isinstance(state, dict):
        found = {key: _filled(value, saved) for key, value in state.items()}
        return {key: value for key, value in found.items() if value is not None} or None
    if isinstance(state, LocalNonpersistentObject):
        return state.obj
    if not isinstance(state, ShardedTensor):
        return None
    if state.key not in saved.tensors:
        return None
    assert saved.tensors[state.key].shape == state.global_shape
    return state.data.copy_(saved.tensors[state.key][state.place()])


def _merged(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _merged(one.get(key), other.get(key)) for key in {**one, **other}}
    return other if one is None else one
