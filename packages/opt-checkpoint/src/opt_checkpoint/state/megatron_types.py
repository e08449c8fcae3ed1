"""Megatron-Core's own sharded types, which every model of it describes itself with, as the types of this package; and
the plain values of its optimizers.

The types are recognised by the module of their class, so that Megatron-Core need not be installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.factory import ShardedTensorFactory
from opt_checkpoint.state.sharded import LocalNonpersistentObject, ShardedObject, ShardedTensor

MEGATRON = "megatron.core.dist_checkpointing.mapping"
RESHARDABLE = "fully_reshardable"  # the format of its distributed optimizer
_FIELDS = (  # of a ShardedTensor, in the order of both classes
    "key data dtype local_shape global_shape global_offset axis_fragmentations replica_id prepend_axis_num "
    "allow_shape_mismatch flattened_range"
)


def from_megatron(state: Any) -> Any:
    """Return a nested state with this package's types in place of Megatron-Core's: new containers where there are any.

    Raises:
        CheckpointingException: the fields of one contradict each other, or it is of an unknown type.
    """
    if isinstance(state, dict):
        items = {key: from_megatron(value) for key, value in state.items()}
        if all(items[key] is value for key, value in state.items()):
            return state
        return state.like(items) if hasattr(state, "like") else items
    if type(state) in (list, tuple):
        values = [from_megatron(value) for value in state]
        return state if all(a is b for a, b in zip(values, state)) else type(state)(values)
    names = [cls.__name__ for cls in type(state).__mro__ if cls.__module__ == MEGATRON]
    if not names:
        return state
    if "ShardedTensor" in names:
        return ShardedTensor(*(getattr(state, field) for field in _FIELDS.split()))
    if "ShardedTensorFactory" in names:
        build = lambda *arguments: from_megatron(state.build_fn(*arguments))
        return ShardedTensorFactory(
            state.key, state.data, build, state.merge_fn, state.replica_id, state.flattened_range
        )
    if "ShardedObject" in names:
        return ShardedObject(state.key, state.data, state.global_shape, state.global_offset, state.replica_id)
    if "LocalNonpersistentObject" in names:
        return LocalNonpersistentObject(state.obj)
    raise CheckpointValueError(f"{type(state).__name__} of Megatron-Core cannot be saved here; pass a ShardedTensor")


def optimizer_entry(
    form: str, groups: Sequence[Mapping[str, Any]], step: int | None, scaler: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the plain values of one of Megatron-Core's optimizers.

    Args:
        form: `"fp32"`; `"mixed"`, of 16-bit parameters; or `"distributed"`, in the format `RESHARDABLE`.
        groups: in its form.
        step: stored beside the states of the first two forms; None for none.
        scaler: the loss scale; empty for a constant one.
    """
    inner: dict[str, Any] = {"param_groups": groups}
    if form != "distributed":
        inner["state"] = {} if step is None else {"common_step": _fp32(float(step))}
    entry: dict[str, Any] = inner if form == "fp32" else {"optimizer": inner}
    if form == "distributed":
        entry["param_state_sharding_type"] = RESHARDABLE
    if scaler:
        entry["grad_scaler"] = {**scaler, "scale": _fp32([float(scaler["scale"])])}
    return entry


def _fp32(value: float | list[float]) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")
