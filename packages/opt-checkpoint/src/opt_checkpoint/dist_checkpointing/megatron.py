"""Megatron-Core's own type of tensors and values of its optimizers, for its `dist_checkpointing.save` and `load`."""

from __future__ import annotations

import sys
from typing import Any

from opt_checkpoint.boxes import boxes_of, view_of
from opt_checkpoint.disk.main_weights import Compared, compare_end, shifted_of
from opt_checkpoint.state.megatron_types import MEGATRON, RESHARDABLE, optimizer_entry
from opt_checkpoint.state.sharded import ShardedTensor

__all__ = ["RESHARDABLE", "Compared", "compare_end", "local_object", "optimizer_entry", "shifted_of", "to_megatron"]


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
