"""The chunk table: many tensors as one list of equal runs of memory, so that one launch sweeps a whole model.

A record holds all that one program of a launch needs, in eight or sixteen adjacent int64, so that one memory
transaction loads it:

    address of the chunk in each column ... | elements in the chunk | row of the scalar block | first element

The addresses are those of the chunk, in bytes. Addresses of gradients are in a separate column: gradients move
whenever `.grad` is set to None, and then only that column is rewritten.

Tables depend only on addresses and sizes, and are cached by these. If parameters, states and gradients stay in place
(flat buffers always do), a step builds and copies nothing.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from opt_kernels.devices import is_cuda, launching_on

T = TypeVar("T")
LINE = 8  # int64 per 64-byte memory line; a record takes one line, or two
TRAILING = 3  # elements, row, first: after the addresses
MIN_CHUNK = 2048
MAX_CHUNK = 16384
PROGRAMS_PER_PROCESSOR = 16  # enough that the last, partly filled wave of programs costs little


class ChunkTableError(ValueError):
    """A table would have to be built and copied to the device while a CUDA graph is captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One tensor of each work, as a column of addresses: `item_bytes` for every `elements` of the parameter."""

    item_bytes: int
    elements: int = 1  # 1, or the block size where the column holds one scale per block


class Extents(NamedTuple):
    """The runs of elements to sweep, one entry per run in each field."""

    numels: tuple[int, ...]
    rows: tuple[int, ...]  # row of the scalar block that updates it
    firsts: tuple[
        int, ...
    ]  # global index of element 0, which seeds stochastic rounding: results do not depend on how a tensor is cut


class ChunkTable(NamedTuple):
    """Chunk records on the device of the tensors they describe."""

    records: Tensor  # (num_chunks, 8 or 16) int64
    grads: Tensor  # (num_chunks,) int64, the address of each chunk's gradient
    chunk: int  # elements in a full chunk

    @property
    def num_chunks(self) -> int:
        return self.grads.shape[0]


def chunk_elements(total: int, *, processors: int) -> int:
    """Elements per chunk: a power of two, large when there is much to do, small enough to occupy every processor."""
    share = total // (PROGRAMS_PER_PROCESSOR * processors)
    return min(MAX_CHUNK, max(MIN_CHUNK, 1 << max(share, 1).bit_length() - 1))


class Chunks(NamedTuple):
    """Runs cut into chunks."""

    run: Tensor  # (num_chunks,) int64, which run the chunk is cut from
    start: Tensor  # (num_chunks,) int64, its first element within the run


def cut(numels: Sequence[int], chunk: int) -> Chunks:
    """Chunks of every run in order; an empty run has none."""
    lengths = torch.tensor(numels, dtype=torch.int64)
    counts = (lengths + chunk - 1) // chunk
    run = torch.repeat_interleave(torch.arange(len(numels)), counts)
    before = torch.cumsum(counts, 0) - counts
    index = torch.arange(len(run)) - before[run]
    return Chunks(run, index * chunk)


def moved(addresses: Sequence[int], chunks: Chunks, column: Column) -> Tensor:
    """Addresses of one column, each moved to the start of its chunk: (num_chunks,) int64 on the host."""
    of_runs = torch.tensor(addresses, dtype=torch.int64)
    return of_runs[chunks.run] + chunks.start // column.elements * column.item_bytes


def record_width(num_columns: int) -> int:
    """int64 in a record: whole memory lines."""
    return -(-(num_columns + TRAILING) // LINE) * LINE


def chunk_records(
    addresses: Sequence[Sequence[int]],  # for each column, the byte address of every run
    columns: Sequence[Column],
    extents: Extents,
    *,
    chunk: int,  # elements; a multiple of every column's `elements`
) -> Tensor:
    """The records of all chunks, (num_chunks, `record_width`) int64 on the host; unused lanes are zero."""
    numels, rows, firsts = (torch.tensor(field, dtype=torch.int64) for field in extents)
    chunks = cut(extents.numels, chunk)
    records = torch.zeros(len(chunks.run), record_width(len(columns)), dtype=torch.int64)
    for lane, (column, of_runs) in enumerate(zip(columns, addresses)):
        records[:, lane] = moved(of_runs, chunks, column)
    records[:, -3] = (numels[chunks.run] - chunks.start).clamp(max=chunk)
    records[:, -2] = rows[chunks.run]
    records[:, -1] = firsts[chunks.run] + chunks.start
    return records


def is_capturing(device: torch.device) -> bool:
    """Whether launches on `device` are being captured in a CUDA graph."""
    if not is_cuda(device):
        return False
    with launching_on(device):
        return torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> int:
    """The current stream of `device`; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if is_cuda(device) else 0


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy `host` to `device` without synchronizing. Raises ChunkTableError while a graph is captured."""
    if is_capturing(device):
        raise ChunkTableError(
            "a table would have to be copied to the device while a graph is captured, because a tensor has moved since "
            "the last step, or there was none; run one step before the capture and keep gradients in place "
            "(zero_grad(set_to_none=False), or flat buffers)"
        )
    return host.pin_memory().to(device, non_blocking=True) if is_cuda(device) else host.to(device)


class DeviceTables(Generic[T]):
    """LRU cache of tables on one device.

    Keeps at most `capacity` tables and at most `room` bytes, as counted by `bytes_of`, but always the last table.

    Each stream has tables of its own: a copy issued on one stream may not have finished when another stream reads it,
    and its memory may be reused while the other stream still reads. A capture, which starts after all streams are
    synchronized, uses the tables of any stream.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        capacity: int = 64,
        room: int = 1 << 28,
        bytes_of: Callable[[T], int] = lambda table: 0,
    ) -> None:
        self._device = device
        self._capacity = capacity
        self._room = room
        self._bytes_of = bytes_of
        self._bytes = 0
        self._tables: OrderedDict[tuple[int, Hashable], T] = OrderedDict()  # by stream and key
        self._last: tuple[tuple[int, Hashable], T] | None = None
        # A captured graph reads its tables for as long as it can be replayed, which is unknown here: tables that a
        # capture used are never freed.
        self._captured: list[T] = []

    def __len__(self) -> int:
        return len(self._tables)

    def get(self, key: Hashable, build: Callable[[], T], *, holds: Callable[[T], bool] | None = None) -> T:
        """The table of `key`, built by `build` if it is missing or if `holds` returns False for it."""
        capturing = is_capturing(self._device)
        place = (current_stream(self._device), key)
        table = self._found(place)
        if table is None and capturing:
            table = next((other for (_, known), other in self._tables.items() if known == key), None)
        if table is None or (holds is not None and not holds(table)):
            table = build()
            self._keep(place, table)
        if capturing and not any(table is kept for kept in self._captured):
            self._captured.append(table)
        return table

    def _keep(self, place: tuple[int, Hashable], table: T) -> None:
        if place in self._tables:
            self._bytes -= self._bytes_of(self._tables[place])
        self._tables[place] = table
        self._tables.move_to_end(place)
        self._last = (place, table)
        self._bytes += self._bytes_of(table)
        while len(self._tables) > self._capacity or (len(self._tables) > 1 and self._bytes > self._room):
            _, oldest = self._tables.popitem(last=False)
            self._bytes -= self._bytes_of(oldest)

    def _found(self, place: tuple[int, Hashable]) -> T | None:
        # Most steps repeat the last one, and comparing a key of a thousand addresses is cheaper than hashing it.
        # Keeping the caller's key, not an equal one, makes the next comparison one of object identity.
        if self._last is not None and self._last[0] == place:
            self._last = (place, self._last[1])
            return self._last[1]
        table = self._tables.get(place)
        if table is not None:
            self._tables.move_to_end(place)
            self._last = (place, table)
        return table
