"""The index of a checkpoint: its contents and their positions, in one form for our own, stock and Megatron-Core ones.

The stored tensors of our own are columns, from which objects are created on access: a rank of a large run needs a few
hundred of half a million chunks. Creating objects for all of them would take minutes and gigabytes on every rank. The
columns take milliseconds, are checked as a whole, and are sent to other ranks unchanged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opt_checkpoint.boxes import Array, Box, position_of, row_major_strides
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.state.sharded import Shape, with_axis
from opt_checkpoint.state.tensors import dtype_from_name
from opt_checkpoint.store import Location

_FILE_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.\-]*")
PATHS = "paths"  # in the details: the paths of plain values by key
COMMON_KEY = "common_state/shard_0_1"
COPIES = "copies"  # in the details: tensors that need not be requested, because others are stored in the same bytes
PADDED = "padded"  # in the details: tensors that a state may request with rows after the stored ones, which become zero
MAX_DIMS = 64  # as in torch
PIECE_BYTES = 1 << 20  # the manifest has a checksum of each run of this many bytes of a stored tensor


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

    @property
    def stop(self) -> int:
        """One past the last byte."""
        return self.start + self.nbytes

    def part(self, offset: int, nbytes: int) -> ByteRange:
        """Return a run of bytes within this one, without a checksum."""
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
        first = position_of(self.offsets, strides)
        last = first + position_of([size - 1 for size in self.sizes], strides)
        return first, last + 1

    def of_tensor(self, chunk: Tensor) -> Tensor:
        """Return the box of a whole chunk, as a view."""
        return Box.whole(self.chunk).part_of(chunk, Box(self.offsets, self.sizes))

    def rows(self, axis: int, start: int, count: int) -> Region:
        """Return the box's rows `[start, start + count)` along an axis."""
        offsets = with_axis(self.offsets, axis, self.offsets[axis] + start)
        return Region(self.chunk, offsets, with_axis(self.sizes, axis, count))


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
        """Return the box of the array that contains a box of the chunk."""
        inner = tuple(0 if axis is None else offsets[axis] for axis in self.axes)
        inner_sizes = tuple(1 if axis is None else sizes[axis] for axis in self.axes)
        return Region(self.shape, *Box(inner, inner_sizes).moved(self.offsets))

    def as_stored(self, values: Tensor) -> Tensor:
        """Return a box of the chunk as a view with the axes of the array."""
        kept = [axis for axis in self.axes if axis is not None]
        dropped = [axis for axis in range(values.dim()) if axis not in kept]
        view = values.permute([*dropped, *kept])[(0,) * len(dropped)]
        for position, axis in enumerate(self.axes):
            if axis is None:
                view = view.unsqueeze(position)
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
        """Return the part of the stored array that contains a box of the chunk."""
        if self.within is not None:
            return self.within.region(offsets, sizes)
        return Region(self.box.sizes, offsets, sizes)

    def as_stored(self, values: Tensor) -> Tensor:
        """Return a box of the chunk as a view with the axes of the stored array."""
        if self.within is None:
            return values
        return self.within.as_stored(values)


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

    @property
    def fingerprint(self) -> object:
        """What only tensors with equal values in the same chunks have in common; None without checksums."""
        sums = tuple((chunk.box, chunk.place.sums) for chunk in self.chunks)
        return (self.dtype, self.shape, sums) if all(of_chunk for _, of_chunk in sums) else None


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
    details: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors' values."""
        if isinstance(self.tensors, StoredTensors):
            return self.tensors.nbytes
        return sum(stored.nbytes for stored in self.tensors.values())


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
    if held is None or place.start < 0 or place.nbytes < 0 or place.stop > held.size:
        size = "is unknown"
        if held is not None:
            size = f"has {held.size} bytes"
        raise CheckpointCorruptError(f"{key} is listed at [{place.start}, {place.stop}) of {place.file}, which {size}")


def _check_tensor(index: CheckpointIndex, key: str, tensor: StoredTensor) -> None:
    whole = Box.whole(tensor.shape)
    if any(n < 0 for n in tensor.shape):
        raise CheckpointCorruptError(f"{key} has shape {tensor.shape}")
    for chunk in tensor.chunks:
        _check_place(index, key, chunk.place)
        box = chunk.box
        nbytes = chunk.place.nbytes
        expected = box.numel * tensor.dtype.itemsize
        has_axes = len(box.offsets) == len(box.sizes) == len(tensor.shape)
        fits = nbytes == expected  # bare values have just this size
        if chunk.place.archive:
            fits = nbytes >= expected
        if not (has_axes and whole.overlap(box) == box and fits):
            raise CheckpointCorruptError(
                f"chunk {box} of {key} {tensor.shape} does not fit its tensor or its {nbytes} bytes"
            )
    if (elements := sum(chunk.box.numel for chunk in tensor.chunks)) != whole.numel:
        raise CheckpointCorruptError(f"the chunks of {key} hold {elements} elements, the tensor {whole.numel}")


_LIMIT = 1 << 62
_COLUMNS = {
    "keys": ("|u1", 1),  # all keys one after another, as UTF-8
    "key_bytes": ("<u4", 1),
    "dtype": ("|u1", 1),  # a number in the list of dtypes
    "ndim": ("|u1", 1),
    "shape": ("<i8", 2),  # one row per tensor; axes that it has not count 1
    "chunks": ("<i8", 1),  # how many chunks each tensor has; they follow in the tensors' order
    "offsets": ("<i8", 2),  # one row per chunk
    "sizes": ("<i8", 2),
    "file": ("<u4", 1),  # a number in the list of files
    "start": ("<i8", 1),
    "sums": ("<u4", 1),  # CRC-32 of every `PIECE_BYTES` of every chunk
}


class StoredTensors(Mapping[str, StoredTensor]):
    """Stored tensors by key.

    Args:
        columns: as `_COLUMNS` lists them.
        dtypes: names of dtypes, by number.
        files: the data files, by number.

    Raises:
        CheckpointCorruptError: a column is missing, columns contradict each other or the files, a chunk lies outside
            its tensor, or the chunks do not add up to their tensor.
    """

    def __init__(self, columns: Mapping[str, Array], dtypes: tuple[str, ...], files: Mapping[str, StoredFile]) -> None:
        for name, (dtype, ndim) in _COLUMNS.items():
            column = columns.get(name)
            if column is None or column.dtype.str != dtype or column.ndim != ndim:
                raise CheckpointCorruptError(f"the manifest has no column {name} of {dtype} with {ndim} axes")
        self.columns = {name: columns[name] for name in _COLUMNS}
        self.dtypes = dtypes
        self._files = dict(files)
        self._check()

    def __getstate__(self) -> tuple[Any, ...]:
        return self.columns, self.dtypes, self._files

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.columns, self.dtypes, self._files = state
        self._derive()  # checked where they were read

    def _derive(self) -> None:
        """Keys, and for each chunk the index of its tensor, its bytes and the index of its first checksum."""
        c = self.columns
        self._dtypes = list(map(dtype_from_name, self.dtypes))
        self._file_names = list(self._files)
        self._made: dict[str, StoredTensor] = {}
        blob = c["keys"].tobytes()
        bounds = accumulate(c["key_bytes"].tolist(), initial=0)
        try:
            keys = [blob[a:b].decode("utf-8", "surrogatepass") for a, b in pairwise(bounds)]
        except UnicodeDecodeError as error:
            raise CheckpointCorruptError(f"the manifest is damaged: a key is not text: {error}") from error
        self._numbers = {key: number for number, key in enumerate(keys)}
        self.owner = np.repeat(np.arange(len(c["chunks"])), c["chunks"])  # (chunks,) the index of the tensor of each
        itemsize = np.array([dtype.itemsize for dtype in self._dtypes], "<i8")
        self._numel = np.prod(c["sizes"], axis=1, dtype="<i8")  # (chunks,)
        self._chunk_bytes = self._numel * itemsize[c["dtype"][self.owner]]
        pieces = np.maximum(1, -(-self._chunk_bytes // PIECE_BYTES))  # (chunks,) number of checksums
        self._first_sum = np.append(0, np.cumsum(pieces, dtype="<i8"))  # (chunks + 1,)
        self._first_chunk = np.append(0, np.cumsum(c["chunks"], dtype="<i8"))  # (tensors + 1,)

    def _check(self) -> None:
        c = self.columns
        tensors = len(c["ndim"])
        chunks = len(c["start"])
        axes = c["shape"].shape[1]
        of_tensors = ("key_bytes", "dtype", "shape", "chunks")
        _require(all(len(c[name]) == tensors for name in of_tensors), "its columns of tensors differ in length")
        _require(all(len(c[name]) == chunks for name in ("offsets", "sizes", "file")), "its columns differ in length")
        chunk_axes = {c["offsets"].shape[1], c["sizes"].shape[1]}
        _require(axes <= MAX_DIMS and chunk_axes == {axes}, "its axes differ")
        _require(c["ndim"].max(initial=0) <= axes, "a tensor has more axes than its shape")
        _require((c["dtype"] < len(self.dtypes)).all(), "a dtype is not listed")
        _require((c["file"] < len(self._files)).all(), "a file is not listed")
        _require(c["key_bytes"].sum() == len(c["keys"]), "its keys do not add up")
        for name in ("shape", "chunks", "offsets", "sizes", "start"):
            is_in_range = (c[name] >= 0) & (c[name] < _LIMIT)
            _require(is_in_range.all(), f"a number of {name} is out of range")
        _require(c["chunks"].sum(dtype=np.float64) == chunks, "its chunks do not add up")
        unused = np.arange(axes) >= c["ndim"][:, None]
        _require((c["shape"][unused] == 1).all(), "a shape has values beyond its axes")
        for name in ("shape", "sizes"):
            rough = np.prod(c[name].astype(np.float64), axis=1)
            _require(rough.max(initial=0) < _LIMIT / 32, "a tensor is larger than any file")
        self._derive()
        _require(len(self._numbers) == tensors, "a key is listed twice")
        stops = c["offsets"] + c["sizes"]  # (chunks, axes)
        is_inside = (c["sizes"] >= 1) & (stops <= c["shape"][self.owner])
        _require(is_inside.all(), "a chunk lies outside its tensor")
        held = np.zeros(tensors, "<i8")
        np.add.at(held, self.owner, self._numel)
        _require((held == np.prod(c["shape"], axis=1, dtype="<i8")).all(), "the chunks of a tensor do not fill it")
        sizes = np.array([file.size for file in self._files.values()], "<i8")
        left = sizes[c["file"]] - c["start"]  # (chunks,) bytes of the file after the start of each
        _require((self._chunk_bytes <= left).all(), "a chunk lies outside its file")
        _require(self._first_sum[-1] == len(c["sums"]), "its checksums do not add up")

    def __getitem__(self, key: str) -> StoredTensor:
        if key not in self._made:
            self._made[key] = self._tensor(self._numbers[key])
        return self._made[key]

    def _tensor(self, number: int) -> StoredTensor:
        c = self.columns
        axes = int(c["ndim"][number])
        first, last = self._first_chunk[number : number + 2].tolist()
        sums = pairwise(self._first_sum[first : last + 1].tolist())
        columns = [c[name][first:last].tolist() for name in ("offsets", "sizes", "file", "start")]
        columns.append(self._chunk_bytes[first:last].tolist())
        chunks = []
        for (low, high), offsets, sizes, file, start, nbytes in zip(sums, *columns, strict=True):
            of_chunk = tuple(c["sums"][low:high].tolist())
            place = ByteRange(file=self._file_names[file], start=start, nbytes=nbytes, sums=of_chunk)
            box = Box(tuple(offsets[:axes]), tuple(sizes[:axes]))
            chunks.append(StoredChunk(box=box, place=place))
        shape = tuple(c["shape"][number, :axes].tolist())
        return StoredTensor(shape=shape, dtype=self._dtypes[c["dtype"][number]], chunks=tuple(chunks))

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __contains__(self, key: object) -> bool:
        return key in self._numbers

    def __len__(self) -> int:
        return len(self.columns["ndim"])

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return int(self._chunk_bytes.sum())


def _require(holds: bool | np.bool_, problem: str) -> None:
    if not holds:
        raise CheckpointCorruptError(f"the manifest contradicts itself: {problem}")
