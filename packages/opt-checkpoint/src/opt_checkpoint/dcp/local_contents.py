"""The tensors and objects that a rank holds, as columns of integers and names, which are sent to the coordinator."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opt_checkpoint.boxes.box import FlatBox, boxes_of
from opt_checkpoint.disk.checksums import bytes_view
from opt_checkpoint.disk.columns import Array
from opt_checkpoint.disk.dtype_names import dtype_name, is_storable
from opt_checkpoint.disk.torch_zip_reader import contiguous
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.dtensor import is_dtensor
from opt_checkpoint.state.flat_state import FlatState
from opt_checkpoint.state.sharded import Shape, ShardedTensor, ShardIdentity, is_main_replica
from opt_checkpoint.state.tree import Path, path_text

_SUMMED_BYTES = 1 << 20  # bytes that a sum converts to 64 bits at a time
_ODD = 0x9E3779B1
MAIN, MAY_REPEAT, PLAIN = 1, 2, 4  # flags of a tensor: a main replica; one with a digest; a plain tensor of the state


class HeldShard(NamedTuple):
    """A sharded tensor of this rank and its non-empty boxes."""

    shard: ShardedTensor
    boxes: tuple[FlatBox, ...]


class LocalTensors(NamedTuple):
    """The sharded tensors of a rank as columns.

    Args:
        keys: of each tensor.
        dtype_names: the dtypes that occur.
        dtypes: of each tensor, a number in `dtype_names`, uint8.
        flags: of each tensor, a sum of `MAIN`, `MAY_REPEAT` and `PLAIN`, uint8.
        ndim: of each tensor, uint8.
        boxes: number of boxes of each tensor, int32.
        shapes: the global shapes, concatenated, int64.
        offsets: the offsets of all boxes, concatenated, int64.
        sizes: the sizes of all boxes, as `offsets`.
    """

    keys: list[str]
    dtype_names: tuple[str, ...]
    dtypes: Array
    flags: Array
    ndim: Array
    boxes: Array
    shapes: Array
    offsets: Array
    sizes: Array

    @classmethod
    def of(cls, held: Sequence[HeldShard], flags: Sequence[int]) -> LocalTensors:
        """The columns of the tensors that a rank holds."""
        names = sorted({dtype_name(h.shard.dtype) for h in held})
        numbers = {name: number for number, name in enumerate(names)}
        return cls(
            keys=[h.shard.key for h in held],
            dtype_names=tuple(names),
            dtypes=np.array([numbers[dtype_name(h.shard.dtype)] for h in held], np.uint8),
            flags=np.array(flags, np.uint8),
            ndim=np.array([len(h.shard.global_shape) for h in held], np.uint8),
            boxes=np.array([len(h.boxes) for h in held], np.int32),
            shapes=np.array([n for h in held for n in h.shard.global_shape], np.int64),
            offsets=np.array([n for h in held for b in h.boxes for n in b.box.offsets], np.int64),
            sizes=np.array([n for h in held for b in h.boxes for n in b.box.sizes], np.int64),
        )


class LocalObject(NamedTuple):
    """One sharded object of a rank.

    Args:
        key: name of the grid of objects.
        unique_key: name of this object in the grid.
        shape: the grid's shape, in objects.
        main: whether this is its main replica.
    """

    key: str
    unique_key: str
    shape: Shape
    main: bool


class LocalLayout(NamedTuple):
    """What a rank holds, without values. A plan depends only on this.

    Args:
        tensors: the sharded tensors.
        objects: the sharded objects.
        plain: paths of the plain tensors, by key; the first rank that holds one is its main replica. Also those of
            DTensors, and of sharded tensors in lists that have the keys of plain tensors.
    """

    tensors: LocalTensors
    objects: tuple[LocalObject, ...]
    plain: dict[str, Path]

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the layout: equal for equal layouts."""
        columns = [column for column in self.tensors if isinstance(column, np.ndarray)]
        about = (self.tensors.keys, self.tensors.dtype_names, self.objects, list(self.plain.items()))
        lengths = [len(column) for column in columns]
        digest = hashlib.sha256(repr((about, lengths)).encode("utf-8", "surrogatepass"))
        for column in columns:
            digest.update(column.tobytes())
        return digest.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalContents:
    """The message of a rank to the coordinator.

    Args:
        layout: what the rank holds; None if the coordinator has it cached.
        digests: of the values of each tensor with the flag `MAY_REPEAT`, int64.
        common: fingerprints of plain values and of plain tensors, by path; empty if they are known to be equal.
    """

    layout: LocalLayout | None
    digests: Array
    common: dict[Path, int] = field(default_factory=dict)


def held_shards(flat: FlatState) -> list[HeldShard]:
    """The sharded tensors of a state in a fixed order, with their boxes."""
    return [HeldShard(shard, tuple(boxes_of(shard))) for shard in flat.tensors.values()]


def local_contents(flat: FlatState, held: Sequence[HeldShard]) -> LocalContents:
    """Describe a rank's state for the coordinator.

    Args:
        flat: the state.
        held: `held_shards(flat)`.

    Raises:
        CheckpointingException: a tensor has no data, is on the meta device, or has a dtype that cannot be stored; or
            two different tensors have one key.
    """
    plain = {path: tensor for path, tensor in flat.plain.items() if not is_dtensor(tensor)}
    values = {**flat.common, **plain}
    first, mains = dict[ShardIdentity, Path](), set[ShardIdentity]()
    flags = [_flags(flat, path, first, mains) | (PLAIN if path in plain else 0) for path in flat.tensors]
    objects = [
        LocalObject(o.key, o.unique_key, o.global_shape, is_main_replica(o.replica_id)) for o in flat.objects.values()
    ]
    paths = {flat.tensors[path].key: path for path in flat.plain}
    paths.update((t.key, path) for path, t in flat.tensors.items() if _is_in_list(path) and t.key == path_text(path))
    digests = [_digest(h.shard) for h, flag in zip(held, flags, strict=True) if flag & MAY_REPEAT]
    return LocalContents(
        layout=LocalLayout(LocalTensors.of(held, flags), tuple(objects), paths),
        digests=np.array(digests, np.int64),
        common={path: fingerprint(value) for path, value in values.items()},
    )


def _is_in_list(path: Path) -> bool:
    return any(type(key) is int for key in path)


def _flags(flat: FlatState, path: Path, first: dict[ShardIdentity, Path], mains: set[ShardIdentity]) -> int:
    """Return the flags of a tensor: whether it is a main replica, and whether it may repeat.

    Two tensors of this rank may share an identity if their values are equal, such as a parameter that two model chunks
    share. Only the first of them is a main replica.

    Args:
        flat: the state.
        path: the tensor.
        first: the path of the first tensor of each identity so far; written.
        mains: the identities that have a main replica so far; written.
    """
    shard = flat.tensors[path]
    _check_storable(shard)
    identity = shard.identity
    other = first.setdefault(identity, path)
    if other != path:
        _check_copy(flat, other, path)
    if not is_main_replica(shard.replica_id) or identity in mains:
        return 0
    mains.add(identity)
    return MAIN | (MAY_REPEAT if shard.may_repeat else 0)


def _check_copy(flat: FlatState, first: Path, second: Path) -> None:
    a, b = flat.tensors[first], flat.tensors[second]
    if a.data is not None and b.data is not None and a.data is not b.data and not _are_equal(a.data, b.data):
        raise CheckpointValueError(
            f"{path_text(first)} and {path_text(second)} would both be stored as {b.key}; give one of them another "
            f"key: put what sharded_model and sharded_optimizer return under different names, or call "
            f"add_prefix_for_sharding(part, 'name.') on one part"
        )


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits_of(a), bits_of(b))


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: 1-D, uint8, on its device."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _digest(shard: ShardedTensor) -> int:
    """A number that is equal for equal values. On a device it is a weighted sum, so that values stay there."""
    if shard.data is None:
        return 0
    return fingerprint(shard.data) if shard.data.device.type == "cpu" else weighted_sum(shard.data)


def weighted_sum(tensor: Tensor) -> int:
    """A sum of a tensor's bytes, weighted by position so that it detects swapped values. Reads one number on the
    host."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in torch.split(bits_of(tensor), _SUMMED_BYTES):
        places = torch.arange(1, part.numel() + 1, device=tensor.device)
        total = total * _ODD + (places * part).sum()  # wraps around
    return int(total)


def _check_storable(shard: ShardedTensor) -> None:
    if shard.data is None:
        raise CheckpointValueError(f"{shard.key} has no data to save")
    if shard.data.is_meta:
        raise CheckpointValueError(f"{shard.key} is on the meta device, without values; materialise it before saving")
    if shard.data.layout is not torch.strided:
        raise CheckpointValueError(
            f"{shard.key} has layout {shard.data.layout}; only dense tensors can be stored, so pass tensor.to_dense()"
        )
    if not is_storable(shard.dtype):
        raise CheckpointValueError(f"{shard.key} has dtype {shard.dtype}, which cannot be stored; convert it first")


def fingerprint(value: Any) -> int:
    """A number that is equal for equal plain values, to compare ranks. For a tensor: of its dtype, shape and bytes."""
    sum_so_far = 0
    for part in _parts(value):
        sum_so_far = zlib.crc32(part, sum_so_far)
    return sum_so_far


def _parts(value: Any) -> Iterable[bytes | memoryview]:
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)}".encode()
        yield bytes_view(contiguous(value))
    elif isinstance(value, dict):
        yield f"dict of {len(value)}".encode()
        for key, inner in value.items():
            yield f"key {key!r}".encode()
            yield from _parts(inner)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} of {len(value)}".encode()
        for inner in value:
            yield from _parts(inner)
    elif isinstance(value, bool | int | float | complex | str | bytes | type(None) | torch.dtype):
        yield f"{type(value).__name__} {value!r}".encode()
    else:  # its repr may contain an address, so ranks compare only the type
        yield f"object of {type(value).__qualname__}".encode()
