"""The storage reader: reads only the requested bytes, directly into the target memory where that is contiguous."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from opt_checkpoint.disk.checked_values import CheckedValues, check_bytes
from opt_checkpoint.disk.checksums import PIECE_BYTES, crc32
from opt_checkpoint.disk.data_file import DataFile, DataFiles
from opt_checkpoint.disk.index import ByteRange, CheckpointIndex, StoredChunk
from opt_checkpoint.disk.read_region import FilePosition, Readable, Region, read_region
from opt_checkpoint.disk.torch_zip_reader import find_values, load_archive
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointingException

_SMALL_BYTES = 256 << 10
_BATCH_BYTES = 4 << 20
_MAX_THREADS = 4


class _Read(NamedTuple):
    """A byte range to read, and the item that it is for.

    Args:
        file: the data file.
        start: first byte.
        nbytes: number of bytes.
        item: the read item that requests them.
        chunk: start of the values of the chunk, if the chunk has several pieces with separate checksums.
    """

    file: str
    start: int
    nbytes: int
    item: ReadItem
    chunk: int | None = None


@dataclass(slots=True)
class ReadCount:
    """Number of bytes read and requested so far."""

    read: int = 0
    wanted: int = 0
    lock: Lock = field(default_factory=Lock, repr=False)


class CheckpointReader(StorageReader):
    """Reads a checkpoint of opt-checkpoint, a stock DCP directory or a Megatron-Core directory, by its index.

    Args:
        index: from `read_index`. threads: number of concurrent reads. check: when to compare values with their
        checksums: while reading, also before any memory is written (which reads
            them twice), or never. Foreign checkpoints have no reliable checksums.
        describe: whether `read_metadata` describes the checkpoint; planners other than ours need that.
    """

    def __init__(
        self,
        index: CheckpointIndex,
        *,
        threads: int = _MAX_THREADS,
        check: Literal["reading", "before", "never"] = "reading",
        describe: bool = True,
    ) -> None:
        self.index = index
        self._describe = describe
        self._check = check
        self.count = ReadCount()
        self._threads = threads
        self._values: dict[StoredChunk, ByteRange | None] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing for the checkpoint that the index describes.

        Raises:
            CheckpointingException: `checkpoint_id` is another path.
        """
        if checkpoint_id is not None and str(checkpoint_id) != str(self.index.path):
            raise CheckpointingException(f"this reader reads {self.index.path}; make another one for {checkpoint_id}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` is a directory."""
        return Path(checkpoint_id).is_dir()

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """The index as DCP's metadata, for other planners."""
        if not self._describe:
            return Metadata({})
        state: dict[str, Any] = {key: BytesStorageMetadata() for key in self.index.objects}
        for key, tensor in self.index.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.box.offsets), torch.Size(c.box.sizes)) for c in tensor.chunks]
            state[key] = TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)
        return Metadata(state, {}, storage_meta=StorageMeta(checkpoint_id=str(self.index.path)))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any) -> None:
        """Do nothing: the constructor received the index."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged. If `check` is "before", first compare its chunks and objects with their checksums.

        Raises:
            CheckpointCorruptError: one does not match, or there are no checksums.
            OSError: a file cannot be read.
        """
        if self._check == "before":
            wanted = {(self._place(item), item.storage_index.fqn): None for item in plan.items}
            if self.index.save_id is None and wanted:
                raise CheckpointCorruptError(
                    f"{self.index.path} was written by {self.index.kind.value} and has no checksums to verify; "
                    f"load with verify='sizes'"
                )
            with DataFiles(self.index) as files, ThreadPoolExecutor(self._threads) as pool:
                for done in [pool.submit(check_bytes, files[place.file], place, key) for place, key in wanted]:
                    done.result()
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything in a plan.

        Raises:
            CheckpointCorruptError: a file is missing, too short, belongs to another save, or has other content.
            OSError: a file cannot be read.
        """
        with DataFiles(self.index) as files, ThreadPoolExecutor(self._threads) as pool:
            reads = sorted((self._read_of(files, item) for item in plan.items), key=lambda r: (r.file, r.start))
            batches = list(_batches(reads, files))
            for done in [pool.submit(self._carry_out, files[b[0].file], b, planner) for b in batches]:
                done.result()
            self.count.read += files.bytes_read
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _chunk(self, item: ReadItem) -> StoredChunk:
        chunks = self.index.tensors[item.storage_index.fqn].chunks
        hint = item.storage_index.index
        offsets = tuple(item.storage_index.offset or ())
        if hint is not None and hint < len(chunks) and chunks[hint].box.offsets == offsets:
            return chunks[hint]
        return next(c for c in chunks if c.box.offsets == offsets)

    def _place(self, item: ReadItem) -> ByteRange:
        if item.type is LoadItemType.BYTE_IO:
            return self.index.objects[item.storage_index.fqn]
        return self._chunk(item).place

    def _read_of(self, files: DataFiles, item: ReadItem) -> _Read:
        """The run of bytes from the first value of an item to its last; for a small chunk, the whole chunk."""
        place = self._place(item)
        if item.type is LoadItemType.BYTE_IO:
            return _Read(place.file, place.start, place.nbytes, item)
        chunk, dtype = self._chunk(item), self.index.tensors[item.storage_index.fqn].dtype
        values = self._values_of(files[place.file], chunk, dtype)
        if values is None:
            return _Read(place.file, place.start, place.nbytes, item)
        if self._check != "never" and values.crc is not None and values.nbytes <= PIECE_BYTES:
            return _Read(place.file, values.start, values.nbytes, item)
        first, last = _region_of(chunk, item).span
        pieced = values.start if values.pieces and self._check != "never" else None
        return _Read(place.file, values.start + first * dtype.itemsize, (last - first) * dtype.itemsize, item, pieced)

    def _values_of(self, file: DataFile, chunk: StoredChunk, dtype: torch.dtype) -> ByteRange | None:
        """The bare values of a chunk; a stock archive is opened once to find them."""
        if not chunk.place.archive:
            return chunk.place
        if chunk not in self._values:
            whole = find_values(file.read, chunk.place, dtype, chunk.archived or chunk.box.sizes)
            self._values[chunk] = whole and whole.part(chunk.first * dtype.itemsize, chunk.box.numel * dtype.itemsize)
        return self._values[chunk]

    def _carry_out(self, file: DataFile, batch: list[_Read], planner: LoadPlanner) -> None:
        """Read one run of a file, which several small items may share, and copy each item's values to its memory."""
        first, last = batch[0], max(batch, key=lambda r: r.start + r.nbytes)
        alone = len(batch) == 1 and first.item.type is LoadItemType.TENSOR and self._is_bare(first.item)
        if alone or first.chunk is not None:
            self._fill(file, batch, planner)
            return
        raw = bytearray(last.start + last.nbytes - first.start)
        file.read_into(first.start, memoryview(raw))
        for read in batch:
            own = memoryview(raw)[read.start - first.start :][: read.nbytes]
            self._take(own, read.item, planner)

    def _is_bare(self, item: ReadItem) -> bool:
        chunk = self._chunk(item)
        return not chunk.place.archive or self._values[chunk] is not None

    def _fill(self, file: DataFile, batch: list[_Read], planner: LoadPlanner) -> None:
        """Read bare values of one chunk directly into their memory."""
        first = batch[0].item
        chunk, dtype = self._chunk(first), self.index.tensors[first.storage_index.fqn].dtype
        values = self._values_of(file, chunk, dtype)
        if values is None:
            raise RuntimeError(f"{first.storage_index} is not stored as bare values")
        source: Readable = file
        if self._check != "never":
            source = CheckedValues(file, values, first.storage_index.fqn)
        for read in batch:
            target = planner.resolve_tensor(read.item).detach()
            region = _region_of(chunk, read.item)
            start = values.start + region.span.start * dtype.itemsize
            read_region(chunk.as_stored(target), region, dtype, FilePosition(source, start))
            self._commit(read.item, target, planner)

    def _take(self, raw: memoryview, item: ReadItem, planner: LoadPlanner) -> None:
        """Copy values from bytes that are already in memory."""
        place = self._place(item)
        if self._check != "never" and place.crc is not None and len(raw) == place.nbytes and crc32(raw) != place.crc:
            raise CheckpointCorruptError(
                f"{self.index.path / place.file} is damaged: the values of {item.storage_index.fqn} have changed"
            )
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(raw))
            return
        chunk, dtype = self._chunk(item), self.index.tensors[item.storage_index.fqn].dtype
        region = _region_of(chunk, item)
        target = planner.resolve_tensor(item).detach()
        if self._is_bare(item):
            whole = chunk.within is None and len(raw) == math.prod(chunk.box.sizes) * dtype.itemsize
            values = raw[region.span.start * dtype.itemsize :] if whole else raw
            chunk.as_stored(target).copy_(region.of_bytes(values, dtype))
        else:
            target.copy_(region.of_tensor(_archived(raw, chunk, dtype)))
        self._commit(item, target, planner)

    def _commit(self, item: ReadItem, target: Tensor, planner: LoadPlanner) -> None:
        with self.count.lock:
            self.count.wanted += target.numel() * self.index.tensors[item.storage_index.fqn].dtype.itemsize
        planner.commit_tensor(item, target)


def _region_of(chunk: StoredChunk, item: ReadItem) -> Region:
    return chunk.region(tuple(item.storage_offsets), tuple(item.lengths))


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
        if batch and not _belongs(batch, end, read, files[read.file].read_sizes.near_bytes):
            yield batch
            batch, end = [], 0
        batch.append(read)
        end = max(end, read.start + read.nbytes)
    if batch:
        yield batch


def _belongs(batch: list[_Read], end: int, read: _Read, near_bytes: int) -> bool:
    first = batch[0]
    if read.file != first.file or read.chunk != first.chunk:
        return False
    if read.chunk is not None:
        return True
    near = read.start - end <= near_bytes and read.start + read.nbytes - first.start <= _BATCH_BYTES
    return near and max(read.nbytes, first.nbytes) <= _SMALL_BYTES
