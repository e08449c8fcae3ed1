"""The storage reader: reads only the requested bytes, directly into the target memory where that is contiguous."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from opt_checkpoint.dcp.load_planner import ShardedLoadPlanner, TensorRead
from opt_checkpoint.disk.checksums import PIECE_BYTES, crc32
from opt_checkpoint.disk.data_file import CheckedValues, DataFile, DataFiles, check_bytes
from opt_checkpoint.disk.index import ByteRange, CheckpointIndex, StoredChunk
from opt_checkpoint.disk.read_region import FilePosition, Readable, Region, read_region
from opt_checkpoint.disk.torch_zip_reader import find_values, load_archive
from opt_checkpoint.errors import CheckpointCorruptError

_SMALL_BYTES = 256 << 10
_BATCH_BYTES = 4 << 20
_MAX_THREADS = 4


class _Read(NamedTuple):
    """A byte range to read, and the item that it is for.

    Args:
        file: the data file.
        start: first byte.
        nbytes: number of bytes.
        item: the tensor, or the key of the object, that they are for.
        chunk: start of the values of the chunk, if the chunk has several pieces with separate checksums.
    """

    file: str
    start: int
    nbytes: int
    item: TensorRead | str
    chunk: int | None = None


class CheckpointReader:
    """Reads a checkpoint of opt-checkpoint, a stock DCP directory or a Megatron-Core directory, by its index.

    Args:
        index: from `read_index`.
        threads: number of concurrent reads.
        check: when to compare values with their checksums: while reading, also before any memory is written (which
            reads them twice), or never. Foreign checkpoints have no reliable checksums.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        *,
        threads: int = _MAX_THREADS,
        check: Literal["reading", "before", "never"] = "reading",
    ) -> None:
        self.index, self._threads, self._check = index, threads, check
        self.bytes_read, self.bytes_wanted = 0, 0
        self._lock = Lock()
        self._values: dict[StoredChunk, ByteRange | None] = {}

    def verify(self, planner: ShardedLoadPlanner) -> None:
        """If `check` is "before", compare the planned chunks and objects with their checksums.

        Raises:
            CheckpointCorruptError: one does not match, or there are no checksums.
            OSError: a file cannot be read.
        """
        if self._check != "before":
            return
        wanted = dict.fromkeys((self._place(item), _key_of(item)) for item in planner.items)
        if self.index.save_id is None and wanted:
            raise CheckpointCorruptError(
                f"{self.index.path} was written by {self.index.kind.value} and has no checksums to verify; "
                f"load with verify='sizes'"
            )
        files = DataFiles(self.index)
        with ThreadPoolExecutor(self._threads) as pool:
            for done in [pool.submit(check_bytes, files[place.file], place, key) for place, key in wanted]:
                done.result()

    def read_data(self, planner: ShardedLoadPlanner) -> None:
        """Read everything that was planned.

        Raises:
            CheckpointCorruptError: a file is missing, too short, belongs to another save, or has other content.
            OSError: a file cannot be read.
        """
        files = DataFiles(self.index)
        with ThreadPoolExecutor(self._threads) as pool:
            planned = [self._read_of(files, item) for item in planner.items]
            batches = list(_batches(sorted(planned, key=lambda r: (r.file, r.start)), files))
            for done in [pool.submit(self._read_batch, files[b[0].file], b, planner) for b in batches]:
                done.result()
            self.bytes_read += files.bytes_read

    def _place(self, item: TensorRead | str) -> ByteRange:
        return self.index.objects[item] if isinstance(item, str) else item.chunk.place

    def _read_of(self, files: DataFiles, item: TensorRead | str) -> _Read:
        """The run of bytes from the first value of an item to its last; for a small chunk, the whole chunk."""
        place = self._place(item)
        values = None if isinstance(item, str) else self._values_of(files[place.file], item.chunk, item.dtype)
        if isinstance(item, str) or values is None:
            return _Read(place.file, place.start, place.nbytes, item)
        if self._check != "never" and values.crc is not None and values.nbytes <= PIECE_BYTES:
            return _Read(place.file, values.start, values.nbytes, item)
        first, last = _region_of(item).span
        pieced = values.start if values.pieces and self._check != "never" else None
        itemsize = item.dtype.itemsize
        return _Read(place.file, values.start + first * itemsize, (last - first) * itemsize, item, pieced)

    def _values_of(self, file: DataFile, chunk: StoredChunk, dtype: torch.dtype) -> ByteRange | None:
        """The bare values of a chunk; a stock archive is opened once to find them."""
        if not chunk.place.archive:
            return chunk.place
        if chunk not in self._values:
            found = find_values(file.read, chunk.place, dtype, chunk.archived or chunk.box.sizes)
            self._values[chunk] = found and found.part(chunk.first * dtype.itemsize, chunk.box.numel * dtype.itemsize)
        return self._values[chunk]

    def _read_batch(self, file: DataFile, batch: list[_Read], planner: ShardedLoadPlanner) -> None:
        """Read one run of a file, which several small items may share, and copy each item's values to its memory."""
        tensors = [read.item for read in batch if not isinstance(read.item, str)]
        values = self._values_of(file, tensors[0].chunk, tensors[0].dtype) if tensors else None
        if values is not None and (len(batch) == 1 or batch[0].chunk is not None):
            self._read_directly(file, tensors, values)
            return
        start = batch[0].start
        raw = memoryview(bytearray(max(read.start + read.nbytes for read in batch) - start))
        file.read_into(start, raw)
        for read in batch:
            self._take(raw[read.start - start :][: read.nbytes], read.item, planner)

    def _read_directly(self, file: DataFile, items: list[TensorRead], values: ByteRange) -> None:
        """Read bare values of one chunk directly into their memory."""
        source: Readable = CheckedValues(file, values, items[0].key) if self._check != "never" else file
        for item in items:
            target, region = item.target().detach(), _region_of(item)
            position = FilePosition(source, values.start + region.span.start * item.dtype.itemsize)
            read_region(item.chunk.as_stored(target), region, item.dtype, position)
            self._add_wanted(item, target)

    def _take(self, raw: memoryview, item: TensorRead | str, planner: ShardedLoadPlanner) -> None:
        """Copy values from bytes that are already in memory."""
        place, key = self._place(item), _key_of(item)
        if self._check != "never" and place.crc is not None and len(raw) == place.nbytes and crc32(raw) != place.crc:
            raise CheckpointCorruptError(f"{self.index.path / place.file} is damaged: the values of {key} have changed")
        if isinstance(item, str):
            planner.load_bytes(key, bytes(raw))
            return
        chunk, dtype = item.chunk, item.dtype
        region, target = _region_of(item), item.target().detach()
        if place.archive and self._values[chunk] is None:
            target.copy_(region.of_tensor(_archived(raw, chunk, dtype)))
        else:
            complete = chunk.within is None and len(raw) == math.prod(chunk.box.sizes) * dtype.itemsize
            values = raw[region.span.start * dtype.itemsize :] if complete else raw
            chunk.as_stored(target).copy_(region.of_bytes(values, dtype))
        self._add_wanted(item, target)

    def _add_wanted(self, item: TensorRead, target: Tensor) -> None:
        with self._lock:
            self.bytes_wanted += target.numel() * item.dtype.itemsize


def _key_of(item: TensorRead | str) -> str:
    return item if isinstance(item, str) else item.key


def _region_of(item: TensorRead) -> Region:
    return item.chunk.region(item.copy.from_offsets, item.copy.sizes)


def _archived(raw: memoryview, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
    tensor, shape = load_archive(bytes(raw)), chunk.archived or chunk.box.sizes
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise CheckpointCorruptError(f"the archive at {chunk.place} does not hold {dtype} of shape {shape}")
    return tensor.reshape(-1)[chunk.first : chunk.first + chunk.box.numel].view(chunk.box.sizes)


def _batches(reads: list[_Read], files: DataFiles) -> Iterator[list[_Read]]:
    """Group reads: small reads that are close together, and reads of one large chunk. All others are separate."""
    batch: list[_Read] = []
    end = 0
    for read in reads:
        if batch and not _belongs(batch[0], end, read, files):
            yield batch
            batch, end = [], 0
        batch.append(read)
        end = max(end, read.start + read.nbytes)
    if batch:
        yield batch


def _belongs(first: _Read, end: int, read: _Read, files: DataFiles) -> bool:
    """Whether a read belongs to the batch that begins with `first` and ends at `end`."""
    if read.file != first.file or read.chunk != first.chunk:
        return False
    if read.chunk is not None:
        return True
    near = read.start - end <= files[read.file].near_bytes
    near = near and read.start + read.nbytes - first.start <= _BATCH_BYTES
    return near and max(read.nbytes, first.nbytes) <= _SMALL_BYTES
