"""Resuming across precisions: under which stored key the most exact values of a tensor are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opt_checkpoint.disk.index import StoredTensor
from opt_checkpoint.state.sharded import ShardedTensor

MAINS = "optimizer.state.fp32_param."


def stored_name(shard: ShardedTensor, stored: Mapping[str, StoredTensor], aliases: Mapping[str, str]) -> str:
    """The stored key that a tensor is read from.

    Its own, or the one that `aliases` give. A parameter asked for in a wider dtype than it is stored in is read from
    its main values; main values that are not stored are read from the parameter. The key itself if nothing is stored.
    """
    key = aliased(shard.key, stored, aliases)
    if key not in stored:
        of_param = aliased(shard.key.removeprefix(MAINS), stored, aliases)
        return of_param if shard.key.startswith(MAINS) and of_param in stored else key
    mains = aliased(MAINS + shard.key, stored, aliases) if shard.has_mains else key
    return mains if is_wider(shard, stored[key]) and mains in stored else key


def is_wider(shard: ShardedTensor, stored: StoredTensor) -> bool:
    """Whether a floating-point tensor is asked for in more bytes than it is stored in."""
    return shard.dtype.is_floating_point and shard.dtype.itemsize > stored.dtype.itemsize


def may_convert(shard: ShardedTensor, stored: StoredTensor) -> bool:
    """Whether the stored dtype may be converted unasked: into fp32 main values, or rounded where mains are exact."""
    if not (shard.dtype.is_floating_point and stored.dtype.is_floating_point):
        return False
    is_main = shard.key.startswith(MAINS) and shard.dtype.itemsize >= stored.dtype.itemsize
    return is_main or (shard.has_mains and shard.dtype.itemsize < stored.dtype.itemsize)


def aliased(key: str, stored: Iterable[str] | Mapping[str, Any], aliases: Mapping[str, str]) -> str:
    """The stored name of a key: itself if stored, else with the first prefix of `aliases` replaced that gives one."""
    if key in stored:
        return key
    for old, new in aliases.items():
        if key.startswith(old) and new + key.removeprefix(old) in stored:
            return new + key.removeprefix(old)
    return key
