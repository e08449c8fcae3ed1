"""The chunk table: many tensors as one list of equal runs of memory, so that one launch sweeps a whole model.

A record holds all that one program of a launch needs, in eight or sixteen adjacent int64, so that one memory
transaction loads it:

    address of the chunk in each column ... | elements in the chunk | row of the scalar block | first element

The addresses are those of the chunk, in bytes. Addresses of gradients are in a separate column: gradients move
whenever `.grad` is set to None, and then only that column is rewritten.

Tables depend only on addresses and sizes, and are cached by these. If parameters, states and gradients stay in place
(flat buffers always do), a step builds and copies nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LINE = 8  # int64 per 64-byte memory line; a record takes one line, or two
TRAILING = 3  # elements, row, first: after the addresses
MIN_CHUNK = 2048
MAX_CHUNK = 16384
PROGRAMS_PER_PROCESSOR = 16  # enough that the last, partly filled wave of programs costs little


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
