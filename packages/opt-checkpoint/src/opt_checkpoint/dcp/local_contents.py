"""What a rank holds and could write, in integers and names, as the coordinator sees it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_checkpoint.boxes.box import Box, boxes_of
from opt_checkpoint.disk.checksums import bytes_view
from opt_checkpoint.disk.dtype_names import dtype_name, is_storable
from opt_checkpoint.disk.torch_zip_reader import contiguous
from opt_checkpoint.errors import CheckpointingException
from opt_checkpoint.state.dtensor import is_dtensor
from opt_checkpoint.state.flat_state import FlatState
from opt_checkpoint.state.sharded import Shape, ShardedTensor, ShardIdentity, is_main_replica
from opt_checkpoint.state.tree import Path, path_text

_SUMMED_BYTES = 1 << 20  # that a sum widens to 64 bits at a time
_ODD = 0x9E3779B1


class LocalTensor(NamedTuple):
    """One sharded tensor of a rank: the boxes it could write.

    Args:
        key: the global tensor.
        dtype: its dtype by name.
        shape: its global shape.
        boxes: the parts held here, none empty.
        main: whether this is the main replica of them.
        digest: of the values, where other ranks may hold the same boxes as main replicas; None elsewhere.
    """

    key: str
    dtype: str
    shape: Shape
    boxes: tuple[Box, ...]
    main: bool
    digest: int | None = None


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
    """All that one rank could write, and the fingerprints of what must be equal on all ranks that hold it.

    Args:
        tensors: the sharded tensors.
        objects: the sharded objects.
        common: fingerprints of plain values and of plain tensors, by path.
        plain: paths of the plain tensors, by key; the first rank that holds one is its main replica.
    """

    tensors: tuple[LocalTensor, ...]
    objects: tuple[LocalObject, ...]
    common: dict[str, int] = field(default_factory=dict)
    plain: dict[str, Path] = field(default_factory=dict)


def local_contents(flat: FlatState) -> LocalContents:
    """What a rank tells the coordinator about its state.

    Raises:
        CheckpointingException: a tensor has no data, is on the meta device, or has a dtype that cannot be stored; or
            two different tensors have one key.
    """
    _check_distinct(flat)
    plain = {path: tensor for path, tensor in flat.plain.items() if not is_dtensor(tensor)}
    values = {**flat.common, **plain}
    seen: dict[ShardIdentity, ShardedTensor] = {}
    return LocalContents(
        tensors=tuple(_local_tensor(t, is_copy=_is_copy(t, seen)) for t in flat.tensors.values()),
        objects=tuple(
            LocalObject(o.key, o.unique_key, o.global_shape, is_main_replica(o.replica_id))
            for o in flat.objects.values()
        ),
        common={path_text(path): fingerprint(value) for path, value in values.items()},
        plain={flat.tensors[path].key: path for path in plain},
    )


def _check_distinct(flat: FlatState) -> None:
    """Refuse a key that this rank gives to two different tensors: the second would be lost.

    Copies of one tensor may share a key where their values are equal, as tied weights do.
    """
    first: dict[ShardIdentity, Path] = {}
    for path, shard in flat.tensors.items():
        other = first.setdefault(shard.identity, path)
        a, b = flat.tensors[other].data, shard.data
        if other == path or a is b or a is None or b is None or a.is_meta or _are_equal(a, b):
            continue
        raise CheckpointingException(
            f"{path_text(other)} and {path_text(path)} would both be stored as {shard.key}; give one of them another "
            f"key: put what sharded_model and sharded_optimizer return under different names, or call "
            f"add_prefix_for_sharding(part, 'name.') on one part"
        )


def with_one_main_each(per_rank: Sequence[LocalContents]) -> list[LocalContents]:
    """The contents of all ranks, where of blocks that may repeat and have equal values the first is the main replica.

    Blocks with other values stay main replicas, which validation refuses.
    """
    first: dict[tuple[str, tuple[Box, ...]], int] = {}

    def settled(tensor: LocalTensor) -> LocalTensor:
        if not tensor.main or tensor.digest is None or not tensor.boxes:
            return tensor
        at = tensor.key, tensor.boxes
        is_repeated = at in first and first[at] == tensor.digest
        first.setdefault(at, tensor.digest)
        return tensor._replace(main=not is_repeated)

    return [replace(own, tensors=tuple(map(settled, own.tensors))) for own in per_rank]


def with_plain_on_one(per_rank: Sequence[LocalContents], *, only_first: bool) -> list[LocalContents]:
    """The contents with one main replica of every plain tensor: on the first rank that holds it.

    Args:
        per_rank: what each rank could write, by rank.
        only_first: whether the other ranks' copies may not be written, because they may differ.
    """
    taken: set[str] = set()
    changed = []
    for own in per_rank:
        again = own.plain.keys() & taken
        tensors = [t if t.key not in again else t._replace(main=False) for t in own.tensors]
        if only_first:
            tensors = [t if t.key not in again else t._replace(boxes=()) for t in tensors]
        changed.append(replace(own, tensors=tuple(tensors)))
        taken |= own.plain.keys()
    return changed


def _is_copy(shard: ShardedTensor, seen: dict[ShardIdentity, ShardedTensor]) -> bool:
    """Whether this rank holds the same block twice with equal values, as a parameter that two model chunks share."""
    if shard.data is None or not is_main_replica(shard.replica_id):
        return False
    first = seen.setdefault(shard.identity, shard)
    return first is not shard and first.data is not None and _are_equal(first.data, shard.data)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits_of(a), bits_of(b))


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: 1-D, uint8, on its device."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _digest(tensor: Tensor) -> int:
    """A number equal for equal values; on a device a weighted sum, so that values need not come to the host."""
    return fingerprint(tensor) if tensor.device.type == "cpu" else weighted_sum(tensor)


def weighted_sum(tensor: Tensor) -> int:
    """A sum of a tensor's bytes, each multiplied by its place, so that exchanged values change it; one host read."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in torch.split(bits_of(tensor), _SUMMED_BYTES):
        places = torch.arange(1, part.numel() + 1, device=tensor.device)
        total = total * _ODD + (places * part).sum()  # wraps around
    return int(total)


def _local_tensor(shard: ShardedTensor, *, is_copy: bool) -> LocalTensor:
    if shard.data is None:
        raise CheckpointingException(f"{shard.key} has no data to save")
    if shard.data.is_meta:
        raise CheckpointingException(f"{shard.key} is on the meta device, without values; materialise it before saving")
    if not is_storable(shard.dtype):
        raise CheckpointingException(f"{shard.key} has dtype {shard.dtype}, which cannot be stored; convert it first")
    boxes = tuple(held.box for held in boxes_of(shard))
    main = is_main_replica(shard.replica_id) and not is_copy
    digest = _digest(shard.data) if main and shard.may_repeat else None
    return LocalTensor(shard.key, dtype_name(shard.dtype), shard.global_shape, boxes, main, digest)


def fingerprint(value: Any) -> int:
    """A number equal for equal plain values, to compare ranks by; a tensor counts by dtype, shape and bytes."""
    sum_so_far = 0
    for part in _parts(value):
        sum_so_far = zlib.crc32(part, sum_so_far)
    return sum_so_far


def _parts(value: Any) -> Iterable[bytes | memoryview]:
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)}".encode()
        yield bytes_view(contiguous(value))
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
