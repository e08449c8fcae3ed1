"""What a rank holds and could write, in integers and names, as the coordinator sees it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_checkpoint.boxes.box import Box, boxes_of
from opt_checkpoint.disk.checksums import bytes_view
from opt_checkpoint.disk.dtype_names import dtype_name, is_storable
from opt_checkpoint.errors import CheckpointingException
from opt_checkpoint.state.flat_state import FlatState
from opt_checkpoint.state.sharded import Shape, ShardedTensor, is_main_replica
from opt_checkpoint.state.tree import path_text


class LocalTensor(NamedTuple):
    """One sharded tensor of a rank: the boxes it could write.

    Args:
        key: the global tensor.
        dtype: its dtype by name.
        shape: its global shape.
        boxes: the parts held here, none empty.
        main: whether this is the main replica of them.
    """

    key: str
    dtype: str
    shape: Shape
    boxes: tuple[Box, ...]
    main: bool


class LocalObject(NamedTuple):
    """One sharded object of a rank.

    Args:
        key: the grid of objects.
        unique_key: this one of them.
        shape: the grid's shape, in objects.
        main: whether this is its main replica.
    """

    key: str
    unique_key: str
    shape: Shape
    main: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalContents:
    """All that one rank could write, and the fingerprints of its common values."""

    tensors: tuple[LocalTensor, ...]
    objects: tuple[LocalObject, ...]
    common: dict[str, int] = field(default_factory=dict)


def local_contents(flat: FlatState) -> LocalContents:
    """What a rank tells the coordinator about its state.

    Raises:
        CheckpointingException: a tensor has no data, or a dtype that cannot be stored.
    """
    return LocalContents(
        tensors=tuple(_local_tensor(t) for t in flat.tensors.values()),
        objects=tuple(
            LocalObject(o.key, o.unique_key, o.global_shape, is_main_replica(o.replica_id))
            for o in flat.objects.values()
        ),
        common={path_text(path): fingerprint(value) for path, value in flat.common.items()},
    )


def _local_tensor(shard: ShardedTensor) -> LocalTensor:
    if shard.data is None:
        raise CheckpointingException(f"{shard.key} has no data to save")
    if not is_storable(shard.dtype):
        raise CheckpointingException(f"{shard.key} has dtype {shard.dtype}, which cannot be stored; convert it first")
    boxes = tuple(held.box for held in boxes_of(shard))
    main = is_main_replica(shard.replica_id)
    return LocalTensor(shard.key, dtype_name(shard.dtype), shard.global_shape, boxes, main)


def fingerprint(value: Any) -> int:
    """A number equal for equal plain values, to compare ranks by; a tensor counts by dtype, shape and bytes."""
    sum_so_far = 0
    for part in _parts(value):
        sum_so_far = zlib.crc32(part, sum_so_far)
    return sum_so_far


def _parts(value: Any) -> Iterable[bytes | memoryview]:
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)}".encode()
        yield bytes_view(value.detach().to("cpu").contiguous())
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield f"key {key!r}".encode()
            yield from _parts(inner)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} of {len(value)}".encode()
        for inner in value:
            yield from _parts(inner)
    elif isinstance(value, bool | int | float | complex | str | bytes | type(None) | torch.dtype):
        yield f"{type(value).__name__} {value!r}".encode()
    else:  # its repr may hold an address; the type is all that ranks can compare
        yield f"object of {type(value).__qualname__}".encode()
