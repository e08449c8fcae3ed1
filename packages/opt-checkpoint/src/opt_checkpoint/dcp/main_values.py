"""Resuming with another precision: conversions that are exact, or lose nothing because main values are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opt_checkpoint.disk.index import StoredTensor
from opt_checkpoint.state.sharded import ShardedTensor

MAINS = "optimizer.state.fp32_param."


def is_wider(shard: ShardedTensor, stored: StoredTensor) -> bool:
    """Whether a floating-point tensor is requested in a wider dtype than it is stored in."""
    return shard.dtype.is_floating_point and shard.dtype.itemsize > stored.dtype.itemsize


def may_convert(shard: ShardedTensor, stored: StoredTensor) -> bool:
    """Return whether a dtype is converted without `dtype="cast"`: to fp32 mains, or rounded if mains are exact."""
    if not (shard.dtype.is_floating_point and stored.dtype.is_floating_point):
        return False
    is_main = MAINS.partition(".")[2] in shard.key and shard.dtype.itemsize >= stored.dtype.itemsize
    return is_main or (shard.has_mains and shard.dtype.itemsize < stored.dtype.itemsize)


def aliased(key: str, stored: Iterable[str] | Mapping[str, Any], aliases: Mapping[str, str]) -> str:
    """The stored name of a key: the key itself, else the first stored name that replacing a prefix by `aliases`
    yields."""
    if key in stored:
        return key
    for old, new in aliases.items():
        if key.startswith(old) and new + key.removeprefix(old) in stored:
            return new + key.removeprefix(old)
    return key
