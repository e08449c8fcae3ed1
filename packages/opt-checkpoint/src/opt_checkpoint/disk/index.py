"""The index of a checkpoint: its contents and their positions, in one form for our own, stock and Megatron-Core
ones."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_checkpoint.boxes import Box, row_major_strides
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.state.sharded import Shape
from opt_checkpoint.store import Location

_FILE_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.\-]*")
PATHS = "paths"  # in the details: the paths of plain values by key
COMMON_KEY = "common_state/shard_0_1"
COPIES = "copies"  # in the details: tensors that need not be requested, because others are stored in the same bytes
MAX_DIMS = 64  # as in torch


class Kind(Enum):
    """Who wrote a checkpoint."""

    OURS = "opt-checkpoint"  # a manifest is there, and its checksum is right
    DCP = "torch.distributed.checkpoint"  # only `.metadata`
    MEGATRON = "torch_dist"  # `.metadata` and `metadata.json` of Megatron-Core
    SAFETENSORS = "safetensors"  # files of Hugging Face, read under other names

    def unwrapped(self, loaded: Any) -> Any:
        """Return an object as it was passed to `save`: Megatron-Core and we store it in a list of one, stock writers do
        not."""
        if self is not Kind.DCP and isinstance(loaded, list) and len(loaded) == 1:
            return loaded[0]
        return loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """A run of bytes in a file of the checkpoint.

    Args:
        file: name within the checkpoint's directory.
        start: first byte.
        nbytes: number of bytes.
        sums: their CRC-32, or the CRC-32 of each `PIECE_BYTES` of them; empty if the writer recorded none.
        archive: whether they are a whole `torch.save` archive (stock chunks), not bare values or a bare object.
    """

    file: str
    start: int
    nbytes: int
    sums: tuple[int, ...] = ()
    archive: bool = False

    def part(self, offset: int, nbytes: int) -> ByteRange:
        """A run of bytes within this one, without a checksum."""
        return ByteRange(file=self.file, start=self.start + offset, nbytes=nbytes)


class Region(NamedTuple):
    """A box of values within a chunk.

    Args:
        chunk: shape of the chunk.
        offsets: offsets of the box in it.
        sizes: shape of the box.
    """

    chunk: Shape
    offsets: Shape
    sizes: Shape

    @property
    def span(self) -> tuple[int, int]:
        """The elements `[start, stop)` of the chunk's row-major order from the first value of the box to its last."""
        strides = row_major_strides(self.chunk)
        start = sum(o * s for o, s in zip(self.offsets, strides))
        return start, start + sum((n - 1) * s for n, s in zip(self.sizes, strides)) + 1

    def of_bytes(self, raw: memoryview, dtype: torch.dtype) -> Tensor:
        """The box as a view of bytes that begin with its span."""
        return torch.frombuffer(raw, dtype=dtype).as_strided(self.sizes, row_major_strides(self.chunk))

    def of_tensor(self, chunk: Tensor) -> Tensor:
        """The box of a whole chunk, as a view."""
        return Box((0,) * len(self.chunk), self.chunk).part_of(chunk, Box(self.offsets, self.sizes))

    def rows(self, axis: int, start: int, count: int) -> Region:
        """The box's rows `[start, start + count)` along an axis."""
        offsets = tuple(o + start if d == axis else o for d, o in enumerate(self.offsets))
        return Region(self.chunk, offsets, tuple(count if d == axis else n for d, n in enumerate(self.sizes)))


class Within(NamedTuple):
    """The position of a chunk in a larger array, whose axes may be in another order.

    Args:
        shape: shape of the array.
        offsets: offsets of the chunk in it.
        axes: for every axis of the array, the corresponding axis of the chunk; None if the chunk has no such axis. The
            chunk has size 1 along axes that are not listed.
    """

    shape: Shape
    offsets: Shape
    axes: tuple[int | None, ...]

    def region(self, offsets: Shape, sizes: Shape) -> Region:
        """The box of the array that contains a box of the chunk."""
        inner = [0 if axis is None else offsets[axis] for axis in self.axes]
        shape = tuple(1 if axis is None else sizes[axis] for axis in self.axes)
        return Region(self.shape, tuple(o + i for o, i in zip(self.offsets, inner)), shape)

    def as_stored(self, values: Tensor) -> Tensor:
        """A box of the chunk as a view with the axes of the array."""
        kept = [axis for axis in self.axes if axis is not None]
        dropped = [axis for axis in range(values.dim()) if axis not in kept]
        view = values.permute([*dropped, *kept])[(0,) * len(dropped)]
        for position, axis in enumerate(self.axes):
            view = view.unsqueeze(position) if axis is None else view
        return view


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """A box of a tensor, and the position of its values.

    Args:
        box: the part of the tensor.
        place: the bytes that hold the box, or the whole array that contains it.
        archived: shape of the tensor in the archive at `place`; None if it is the shape of the box.
        first: number of elements of that tensor, in row-major order, before the box.
        within: the position of the box in the array at `place`; None if the array is the box.
    """

    box: Box
    place: ByteRange
    archived: Shape | None = None
    first: int = 0
    within: Within | None = None

    def region(self, offsets: Shape, sizes: Shape) -> Region:
        """The part of the stored array that contains a box of the chunk."""
        if self.within is not None:
            return self.within.region(offsets, sizes)
        return Region(self.box.sizes, offsets, sizes)

    def as_stored(self, values: Tensor) -> Tensor:
        """A box of the chunk as a view with the axes of the stored array."""
        return values if self.within is None else self.within.as_stored(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A stored global tensor. Its chunks are disjoint and cover it."""

    shape: Shape
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """Size of a file in bytes and, where recorded, its CRC-32."""

    size: int
    crc: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """Everything about a checkpoint except its values.

    Args:
        path: its directory, or the prefix of its files in an object store.
        kind: who wrote it.
        tensors: stored tensors by key.
        objects: stored objects by unique key, including the common state.
        files: the data files.
        save_id: names the save that wrote it; every data file begins with it. None for foreign checkpoints.
        details: what else the writer recorded (versions, world sizes); for people.
    """

    path: Location
    kind: Kind
    tensors: Mapping[str, StoredTensor]
    objects: dict[str, ByteRange]
    files: dict[str, StoredFile]
    save_id: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors' values."""
        summed = getattr(self.tensors, "nbytes", None)
        return sum(t.nbytes for t in self.tensors.values()) if summed is None else int(summed)


def check_index(index: CheckpointIndex) -> None:
    """Reject an index with impossible values, before files are opened or memory is allocated according to it.

    Raises:
        CheckpointCorruptError: a file name that leaves the directory, a place outside its file, a chunk outside its
            tensor, sizes that do not agree, or chunks that do not add up to the tensor.
    """
    for name, file in index.files.items():
        check_file_name(name)
        if not 0 <= file.size < 1 << 63:
            raise CheckpointCorruptError(f"file {name} is listed with a size of {file.size} bytes")
    for key, place in index.objects.items():
        _check_place(index, key, place)
    if isinstance(index.tensors, dict):  # columns have been checked as a whole
        for key, tensor in index.tensors.items():
            _check_tensor(index, key, tensor)


def check_file_name(name: str) -> None:
    """Raise `CheckpointCorruptError` unless `name` is a plain file name without folders or `..`."""
    if not _FILE_NAME.fullmatch(name) or name in (".", ".."):
        raise CheckpointCorruptError(
            f"file name {name!r} in the checkpoint's index is not a plain name; nothing is opened"
        )


def _check_place(index: CheckpointIndex, key: str, place: ByteRange) -> None:
    held = index.files.get(place.file)
    if held is None or place.start < 0 or place.nbytes < 0 or place.start + place.nbytes > held.size:
        size = "is unknown" if held is None else f"has {held.size} bytes"
        raise CheckpointCorruptError(
            f"{key} is listed at [{place.start}, {place.start + place.nbytes}) of {place.file}, which {size}"
        )


def _check_tensor(index: CheckpointIndex, key: str, tensor: StoredTensor) -> None:
    whole = Box((0,) * len(tensor.shape), tensor.shape)
    if any(n < 0 for n in tensor.shape):
        raise CheckpointCorruptError(f"{key} has shape {tensor.shape}")
    for chunk in tensor.chunks:
        _check_place(index, key, chunk.place)
        inside = len(chunk.box.offsets) == len(chunk.box.sizes) == len(tensor.shape) and (
            whole.overlap(chunk.box) == chunk.box
        )
        if not inside or not _fits(chunk, tensor.dtype):
            raise CheckpointCorruptError(
                f"chunk {chunk.box} of {key} {tensor.shape} does not fit its tensor or its {chunk.place.nbytes} bytes"
            )
    if sum(c.box.numel for c in tensor.chunks) != whole.numel:
        raise CheckpointCorruptError(
            f"the chunks of {key} hold {sum(c.box.numel for c in tensor.chunks)} elements, the tensor {whole.numel}"
        )


def _fits(chunk: StoredChunk, dtype: torch.dtype) -> bool:
    """Whether the size is right: bare values have exactly the size of their elements, an archive at least that."""
    expected = chunk.box.numel * dtype.itemsize
    return chunk.place.nbytes >= expected if chunk.place.archive else chunk.place.nbytes == expected
