"""The tensors and objects that a rank holds, as columns of integers and names, which are sent to rank 0."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from inspect import isroutine
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from opt_checkpoint.boxes import Array, FlatBox
from opt_checkpoint.disk.archives import contiguous
from opt_checkpoint.disk.data_file import bytes_view
from opt_checkpoint.disk.index import COMMON_KEY
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.checksums import are_equal, checksums
from opt_checkpoint.state.sharded import (
    Path,
    Shape,
    ShardedObject,
    ShardedTensor,
    ShardIdentity,
    is_main_replica,
    path_text,
)
from opt_checkpoint.state.tensors import DTYPE_NAMES, check_dense, is_dtensor
from opt_checkpoint.state.tree import FlatState

# Flags of a tensor.
MAIN = 1  # a main replica
MAY_REPEAT = 2  # with a digest
PLAIN = 4  # a plain tensor of the state
Shards: TypeAlias = Sequence[tuple[ShardedTensor, Sequence[FlatBox]]]  # the tensors of a rank and their non-empty boxes


class LocalLayout(NamedTuple):
    """What a rank holds, without values. A plan depends only on this. Tensors are columns.

    Args:
        keys: of each tensor.
        dtypes: names of the dtypes of each tensor.
        flags: of each tensor, a sum of `MAIN`, `MAY_REPEAT` and `PLAIN`, uint8.
        ndim: of each tensor, uint8.
        boxes: number of boxes of each tensor, int32.
        shapes: the global shapes, concatenated, int64.
        offsets: the offsets of all boxes, concatenated, int64.
        sizes: the sizes of all boxes, as `offsets`.
        objects: the sharded objects, without data.
        plain: paths of the plain tensors, by key; the first rank that holds one has the main replica. Also those of
            DTensors, and of sharded tensors in lists that have the keys of plain tensors.
    """

    keys: list[str]
    dtypes: list[str]
    flags: Array
    ndim: Array
    boxes: Array
    shapes: Array
    offsets: Array
    sizes: Array
    objects: tuple[ShardedObject, ...] = ()
    plain: dict[str, Path] = {}  # noqa: RUF012

    @classmethod
    def of(cls, shards: Shards, flags: Sequence[int]) -> LocalLayout:
        """Return the layout of tensors."""
        tensors = [shard for shard, _ in shards]
        boxes = [flat.box for _, of_shard in shards for flat in of_shard]
        num_boxes = [len(of_shard) for _, of_shard in shards]
        shapes = [tensor.global_shape for tensor in tensors]
        return cls(
            keys=[tensor.key for tensor in tensors],
            dtypes=[DTYPE_NAMES[tensor.dtype] for tensor in tensors],
            flags=np.array(flags, np.uint8),
            ndim=np.array(list(map(len, shapes)), np.uint8),
            boxes=np.array(num_boxes, np.int32),
            shapes=_joined(shapes),
            offsets=_joined(box.offsets for box in boxes),
            sizes=_joined(box.sizes for box in boxes),
        )

    @property
    def columns(self) -> list[Array]:
        """From `flags` to `sizes`."""
        return [column for column in self if isinstance(column, np.ndarray)]

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the layout: equal for equal layouts."""
        about = (self.keys, self.dtypes, self.objects, list(self.plain.items()), list(map(len, self.columns)))
        digest = hashlib.sha256(repr(about).encode("utf-8", "surrogatepass"))
        for column in self.columns:
            digest.update(column.tobytes())
        return digest.digest()


def _joined(rows: Iterable[Shape]) -> Array:
    return np.fromiter(chain.from_iterable(rows), np.int64)


class LocalContents(NamedTuple):
    """The message of a rank to rank 0.

    Args:
        layout: what the rank holds; None if rank 0 has it cached.
        digests: of the values of each tensor with the flag `MAY_REPEAT`, int64.
        common: fingerprints of plain values and of plain tensors, by path; empty if they are known to be equal.
    """

    layout: LocalLayout | None
    digests: Array
    common: dict[Path, int] = {}  # noqa: RUF012


def check_object_names(flat: FlatState) -> None:
    """Raise CheckpointValueError if an object would be stored under the name of the plain values."""
    for item in flat.objects.values():
        if item.unique_key == COMMON_KEY:
            raise CheckpointValueError(
                f"a ShardedObject would be stored as {COMMON_KEY}, as the plain values are; give it another key than "
                f"{item.key}"
            )


def local_contents(flat: FlatState, shards: Shards) -> LocalContents:
    """Describe a rank's state for rank 0.

    Two tensors of this rank may share an identity if their values are equal, such as a parameter that two model chunks
    share. Only the first of them is a main replica.

    Args:
        flat: the state.
        shards: its tensors, in order, with their boxes.

    Raises:
        CheckpointingException: a tensor has no data, is on the meta device, or has a dtype that cannot be stored; two
            different tensors have one key; or an object has that of the plain values.
    """
    check_object_names(flat)
    plain = {path: tensor for path, tensor in flat.plain.items() if not is_dtensor(tensor)}
    first = dict[ShardIdentity, Path]()
    mains = set[ShardIdentity]()
    flags = []
    repeating = []
    for path, shard in flat.tensors.items():
        data = shard.data
        if data is None:
            raise CheckpointValueError(f"{shard.key} has no data to save")
        check_dense(shard.key, data)
        if shard.dtype not in DTYPE_NAMES:
            raise CheckpointValueError(f"{shard.key} has dtype {shard.dtype}, which cannot be stored; convert it first")
        identity = shard.identity
        flag = PLAIN if path in plain else 0
        copied = flat.tensors[first.setdefault(identity, path)].data
        if copied is not None and copied is not data and not are_equal(copied, data):
            raise CheckpointValueError(
                f"{path_text(first[identity])} and {path_text(path)} would both be stored as {shard.key}; give one of "
                f"them another key: put what sharded_model and sharded_optimizer return under different names, or call "
                f"add_prefix_for_sharding(part, 'name.') on one part"
            )
        if is_main_replica(shard.replica_id) and identity not in mains:
            mains.add(identity)
            flag |= MAIN
            if shard.may_repeat:
                flag |= MAY_REPEAT
                repeating.append(data)
        flags.append(flag)
    paths = {flat.tensors[path].key: path for path in flat.plain}
    for path, tensor in flat.tensors.items():
        if tensor.key == path_text(path) and any(type(part) is int for part in path):
            paths[tensor.key] = path
    objects = tuple(item.without_data() for item in flat.objects.values())
    layout = LocalLayout.of(shards, flags)._replace(objects=objects, plain=paths)
    common = {path: fingerprint(value) for path, value in {**flat.common, **plain}.items()}
    # On a device a checksum, so that values stay there.
    sums = checksums({at: tensor for at, tensor in enumerate(repeating) if tensor.device.type != "cpu"})
    digests = [sums[at] if at in sums else fingerprint(tensor) for at, tensor in enumerate(repeating)]
    return LocalContents(layout=layout, digests=np.array(digests, np.int64), common=common)


def fingerprint(value: Any, start: int = 0, objects: dict[int, tuple[Any, int]] | None = None) -> int:
    """Return a number that is equal for equal plain values, to compare ranks. For a tensor: of its dtype, shape and
    bytes.

    Args:
        value: any nested value.
        start: the number of what is before it.
        objects: the objects in it that have a number already, by their `id`.
    """
    objects = {} if objects is None else objects
    if isinstance(value, Tensor):
        start = zlib.crc32(f"tensor {value.dtype} {tuple(value.shape)}".encode(), start)
        return zlib.crc32(bytes_view(contiguous(value)), start)
    if isinstance(value, dict):
        start = zlib.crc32(f"dict of {len(value)}".encode(), start)
        for key, inner in value.items():
            start = fingerprint(inner, zlib.crc32(f"key {key!r}".encode(), start), objects)
        return start
    if isinstance(value, list | tuple):
        start = zlib.crc32(f"{type(value).__name__} of {len(value)}".encode(), start)
        for inner in value:
            start = fingerprint(inner, start, objects)
        return start
    if isinstance(value, set | frozenset):  # whose order depends on the hash seed of the process
        elements = sorted(fingerprint(element, 0, objects) for element in value)
        return fingerprint(elements, zlib.crc32(type(value).__name__.encode(), start))
    if isinstance(value, int | float | complex | str | bytes | type(None) | torch.dtype):
        text = f"{type(value).__name__} {value!r}"
    elif isinstance(value, type) or isroutine(value):
        text = f"{getattr(value, '__module__', None)}.{value.__qualname__}"
    else:
        text = f"object {_object_fingerprint(value, objects)}"
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), start)


def _object_fingerprint(value: Any, objects: dict[int, tuple[Any, int]]) -> int:
    """The fingerprint of what is pickled of another object; of its class alone if it cannot be pickled.

    The repr of an object may contain an address, and a pickle depends on which of its parts are the same object.
    """
    if id(value) not in objects:
        start = zlib.crc32(type(value).__qualname__.encode())
        objects[id(value)] = value, start  # for a part that refers to it
        try:
            reduced = value.__reduce_ex__(2)
        except Exception:
            return start
        parts = [list(part) if isinstance(part, Iterator) else part for part in reduced]
        objects[id(value)] = value, fingerprint(parts, start, objects)
    return objects[id(value)][1]
