"""Megatron-Core's own type of tensors and values of its optimizers, for its `dist_checkpointing.save` and `load`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from opt_checkpoint.boxes import boxes_of, view_of
from opt_checkpoint.disk.main_weights import Compared, compare_end, shifted_of
from opt_checkpoint.state.megatron_types import MEGATRON
from opt_checkpoint.state.sharded import ShardedTensor

__all__ = ["RESHARDABLE", "Compared", "compare_end", "local_object", "optimizer_entry", "shifted_of", "to_megatron"]
RESHARDABLE = "fully_reshardable"  # the format of its distributed optimizer


def to_megatron(shard: ShardedTensor) -> list[Any]:
    """Return one tensor of Megatron-Core for each box of `shard`, which shares its memory.

    Megatron-Core has no flat ranges, and needs equal blocks unless `axis_fragmentations` is None; then prepended axes
    are axes of the block.
    """
    mapping = sys.modules[MEGATRON]
    found = []
    for held in boxes_of(shard):
        view = view_of(shard, held, held.box).detach()
        place = tuple(view.shape), shard.global_shape, held.box.offsets
        found.append(mapping.ShardedTensor(shard.key, view, view.dtype, *place, None, shard.replica_id))
    return found


def local_object(value: Any) -> Any:
    """Return a value that Megatron-Core's `save` does not store, and that its `load` returns as it is."""
    return sys.modules[MEGATRON].LocalNonpersistentObject(value)


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


def _fp32(value: float | list[float]) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")
