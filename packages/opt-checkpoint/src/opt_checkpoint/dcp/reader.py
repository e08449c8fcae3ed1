"""The storage reader: reads only the requested bytes, directly into the target memory where that is contiguous."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from opt_checkpoint.dcp.load_planner import ShardedLoadPlanner, TensorRead
from opt_checkpoint.disk.archives import find_values, load_object
from opt_checkpoint.disk.data_file import CheckedValues, DataFiles, Run, damage_of, has_right_sums, read_region
from opt_checkpoint.disk.index import PIECE_BYTES, ByteRange, StoredChunk
from opt_checkpoint.errors import CheckpointCorruptError

Verify: TypeAlias = Literal["sizes", "chunks", "none"]
_SMALL_BYTES = 256 << 10
_BATCH_BYTES = 4 << 20
_MAX_THREADS = 4


class _Read(NamedTuple):
    """A byte range to read, and the tensor that it is for.

    Args:
        item: the tensor.
        place: the byte range.
        chunk: start of the chunk, if it has several pieces with separate checksums, or is loaded whole.
    """

    item: TensorRead
    place: ByteRange
    chunk: int | None = None


class CheckpointReader:
    """Reads what was planned of a checkpoint of opt-checkpoint, a stock DCP directory or a Megatron-Core directory.

    Args:
        planner: has the index of the checkpoint, and its files.
        threads: number of concurrent reads.
        verify: when to compare values with their checksums: while reading (`"sizes"`), also before any memory is
            written, which reads them twice (`"chunks"`), or never (`"none"`). Foreign checkpoints have no reliable
            checksums.
    """

    def __init__(self, planner: ShardedLoadPlanner, *, threads: int = _MAX_THREADS, verify: Verify = "sizes") -> None:
        self.planner = planner
        self._threads = threads
        self._verify = verify
        self._files = planner.files
        self._values: dict[StoredChunk, ByteRange | None] = {}

    def verify(self) -> None:
        """Compare stored values of tensors that share memory; for `verify="chunks"`, planned chunks with checksums.

        Raises:
            CheckpointMismatchError: tensors that share memory are stored with different values.
            CheckpointCorruptError: a chunk does not match, or there are no checksums.
            OSError: a file cannot be read.
        """
        self.planner.check_sharing(self.read)
        if self._verify != "chunks":
            return
        index = self.planner.index
        wanted = dict.fromkeys((item.chunk.place, item.key) for item in self.planner.items)
        if index.save_id is None and wanted:
            raise CheckpointCorruptError(
                f"{index.path} was written by {index.kind.value} and has no checksums to verify; "
                f"load with verify='sizes'"
            )
        files = DataFiles(index)  # whose bytes are not counted
        with ThreadPoolExecutor(self._threads) as pool:
            checks = [pool.submit(has_right_sums, files, place) for place, _ in wanted]
            for (place, key), check in zip(wanted, checks):
                if not check.result():
                    raise damage_of(files, place, key)

    def read(self, items: Sequence[TensorRead]) -> None:
        """Read each item into its target: those that were planned, or copies to compare.

        Raises:
            CheckpointCorruptError: a file is missing, too short, belongs to another save, or has other content.
            OSError: a file cannot be read.
        """
        with ThreadPoolExecutor(self._threads) as pool:
            planned = sorted(map(self._read_of, items), key=lambda read: (read.place.file, read.place.start))
            batches = _batches(planned, self._files.near_bytes)
            list(pool.map(self._read_batch, batches))  # raises the first error

    def _read_of(self, item: TensorRead) -> _Read:
        """The run of bytes from the first value of an item to its last; for a small chunk, the whole chunk."""
        place = item.chunk.place
        values = self._values_of(item)
        if values is None:
            return _Read(item, place, place.start)
        if values.sums and values.nbytes <= PIECE_BYTES:
            return _Read(item, values)
        first, last = item.region.span
        size = item.dtype.itemsize
        part = values.part(first * size, (last - first) * size)
        return _Read(item, part, values.start if values.sums else None)

    def _values_of(self, item: TensorRead) -> ByteRange | None:
        """The bare values of a chunk, with checksums if they are to be compared; a stock archive is opened once to find
        them."""
        chunk = item.chunk
        size = item.dtype.itemsize
        if not chunk.place.archive:
            place = chunk.place
            return place.part(0, place.nbytes) if self._verify == "none" else place
        if chunk not in self._values:
            shape = chunk.archived or chunk.box.sizes
            found = find_values(self._files, chunk.place, item.dtype, shape)
            if found is not None:
                found = found.part(chunk.first * size, chunk.box.numel * size)
            self._values[chunk] = found
        return self._values[chunk]

    @torch.inference_mode()  # there, memory made in inference mode can be written, too
    def _read_batch(self, batch: list[_Read]) -> None:
        """Read one run of a file, which several small items may share, and copy each item's values to its memory."""
        ahead: Run | None = None
        if len(batch) > 1 and batch[0].chunk is None:
            first = batch[0].place
            stop = max(read.place.stop for read in batch)
            ahead = Run(first.start, memoryview(self._files.read(first.part(0, stop - first.start))))
        values: CheckedValues | None = None
        for item in (read.item for read in batch):
            place = self._values_of(item)
            if place is None:
                self._read_archive(item)
                continue
            if values is None or values.place.start != place.start:
                values = CheckedValues(self._files, place, item.key, ahead)
            read_region(item.chunk.as_stored(item.target), item.region, item.dtype, values)

    def _read_archive(self, item: TensorRead) -> None:
        """Load a whole archive, in which the values are not one run, and copy an item's from it."""
        chunk = item.chunk
        place = chunk.place
        tensor = load_object(self._files.read(place))
        shape = chunk.archived or chunk.box.sizes
        is_described = isinstance(tensor, Tensor) and tensor.dtype == item.dtype
        if not is_described or tuple(tensor.shape) != shape:
            raise CheckpointCorruptError(f"the archive at {place} does not hold {item.dtype} of shape {shape}")
        values = tensor.reshape(-1)[chunk.first :][: chunk.box.numel]
        item.target.copy_(item.region.of_tensor(values.view(chunk.box.sizes)))


def _batches(reads: list[_Read], near_bytes: int) -> Iterator[list[_Read]]:
    """Group reads: small reads that are close together, and reads of one large chunk. All others are separate."""
    batch: list[_Read] = []
    end = 0
    for read in reads:
        first = batch[0] if batch else read
        place = read.place
        is_small = max(place.nbytes, first.place.nbytes) <= _SMALL_BYTES
        is_near = is_small and place.stop - first.place.start <= _BATCH_BYTES
        is_near = is_near and place.start - end <= near_bytes
        is_same_place = (place.file, read.chunk) == (first.place.file, first.chunk)
        if batch and not (is_same_place and (is_near or read.chunk is not None)):
            yield batch
            batch = []
            end = 0
        batch.append(read)
        end = max(end, place.stop)
    if batch:
        yield batch
