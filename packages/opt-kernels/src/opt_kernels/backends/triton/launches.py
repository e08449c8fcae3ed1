"""Launches elementwise Triton sweeps for batches of works: one launch per combination of dtypes, over all groups.

The chunk table has many tensors as one list of equal runs of memory, so that one launch sweeps a whole model. A record
holds all that one program of a launch needs, in eight or sixteen adjacent int64, so that one memory transaction loads
it:

    address of the chunk in each column ... | elements in the chunk | row of the scalar block | first element

The addresses are those of the chunk, in bytes. Addresses of gradients are in a separate column: gradients move
whenever `.grad` is set to None, and then only that column is rewritten. Tables depend only on addresses, sizes and
layouts, and are cached by these. If parameters, states and gradients stay in place (flat buffers always do), a step
builds and copies nothing. The look-up is most of the host's work in a step: it processes whole columns and creates no
object per tensor.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.elements import (
    Columns,
    Item,
    LayoutError,
    are_in_order,
    check_item,
    columns_of,
    names_of_columns,
    parts_of,
)
from opt_kernels.backends.tables import DeviceTables, to_device
from opt_kernels.backends.triton.formats import ALIGNMENT, BLOCK, NUM_WARPS, LaunchFormats, triton_dtype, value_dtype
from opt_kernels.codecs import StateCodec
from opt_kernels.works import Batch, Works

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
    # Global index of element 0, which seeds stochastic rounding: results do not depend on how a tensor is cut.
    firsts: tuple[int, ...]


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
    lengths = torch.tensor(numels, dtype=torch.int64, device="cpu")
    counts = (lengths + chunk - 1) // chunk
    run = torch.repeat_interleave(torch.arange(len(numels), dtype=torch.int64, device="cpu"), counts)
    before = torch.cumsum(counts, 0) - counts
    index = torch.arange(len(run), dtype=torch.int64, device="cpu") - before[run]
    return Chunks(run, index * chunk)


def moved(addresses: Sequence[int], chunks: Chunks, column: Column) -> Tensor:
    """Addresses of one column, each moved to the start of its chunk: (num_chunks,) int64 on the host."""
    of_runs = torch.tensor(addresses, dtype=torch.int64, device="cpu")
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
    numels, rows, firsts = (torch.tensor(field, dtype=torch.int64, device="cpu") for field in extents)
    chunks = cut(extents.numels, chunk)
    records = torch.zeros(len(chunks.run), record_width(len(columns)), dtype=torch.int64, device="cpu")
    for lane, (column, of_runs) in enumerate(zip(columns, addresses)):
        records[:, lane] = moved(of_runs, chunks, column)
    records[:, -3] = (numels[chunks.run] - chunks.start).clamp(max=chunk)
    records[:, -2] = rows[chunks.run]
    records[:, -1] = firsts[chunks.run] + chunks.start
    return records


CALLS = 1024  # a step has one per launch group, Muon one per round; calls that do not fit are rebuilt every step
PROCESSORS_OF_A_CPU = 1  # the interpreter runs programs one after the other


class Cut(NamedTuple):
    """A run of elements of one work that a sweep treats as one tensor."""

    work: int  # which work of the call
    begin: int  # its first element within the work
    numel: int
    first: int  # index of that element in the numbering that the sweep uses
    tag: int = 0  # a number stored in every chunk of the run, in a lane after the addresses
    beside: int = 0  # its byte offset in a buffer that the sweep also accesses but that is not in the table


class Launch(NamedTuple):
    """One launch: the formats to compile for, and the table of its chunks."""

    formats: LaunchFormats
    table: ChunkTable
    cuts: tuple[Cut, ...]  # in the order of the table


Launches = list[Launch]


class Cutting(NamedTuple):
    """How works are cut into runs."""

    key: Hashable  # what it depends on, apart from the sizes of the works
    runs: Callable[[int, int], Iterable[Cut]]  # of a work, given by its index and number of elements


class _Part(NamedTuple):
    """The data of one launch that stays valid while tensors stay in place."""

    formats: LaunchFormats
    cuts: tuple[Cut, ...]
    records: Tensor
    chunk: int
    work_of_chunk: Tensor  # (num_chunks,) int64 on the host
    bytes_to_chunk: Tensor  # (num_chunks,) int64 on the host, from the start of the gradient


class _KnownCall(NamedTuple):
    """Cached data of a call, valid while its tensors, except the gradients, stay in place."""

    device: torch.device
    parts: dict[tuple[bool, ...] | None, list[_Part] | None]  # key: whether each gradient is aligned; None if all are
    launches: DeviceTables[Launches | None]  # by the addresses of the gradients


def launch_options(formats: LaunchFormats, table: ChunkTable) -> dict[str, Any]:
    """The keyword arguments common to all sweeps: formats, shape of the launch, compiler options."""
    return {**_constants(formats), "WIDTH": table.records.shape[1], "CHUNK": table.chunk}


@cache
def _constants(formats: LaunchFormats) -> dict[str, Any]:
    return {
        "GRAD": value_dtype(formats.grad),
        "MAIN": triton_dtype(formats.main) if formats.remainder else value_dtype(formats.main),
        "OUT": None if formats.out is None else value_dtype(formats.out),
        "REMAINDER": formats.remainder,
        "IEEE": formats.ieee,
        "BLOCK": BLOCK,
        "E": formats.vector,
        "num_warps": NUM_WARPS,
        # Always explicit: the default differs between versions of Triton and changes the bits of the result.
        "enable_fp_fusion": not formats.ieee,
    }


def processors(device: torch.device) -> int:
    """The approximate number of programs that run at the same time."""
    if device.type != "cuda":
        return PROCESSORS_OF_A_CPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def sweeps(batches: Sequence[Batch], codecs: Mapping[str, StateCodec]) -> Launches:
    """One launch for every combination of dtypes among the works. Empty works are left out.

    Columns: main or remainder, out, the states, then the scales of the states that have scales. Raises LayoutError if
    tensors are on different devices or not contiguous.
    """
    found = cut_sweeps(parts_of(batches), codecs)
    if found is None:
        raise LayoutError("a work has tensors that are not contiguous; pass contiguous tensors")
    return found


def cut_sweeps(
    parts: list[tuple[int, Works]],  # with their rows of the scalar block
    codecs: Mapping[str, StateCodec],
    cutting: Cutting | None = None,  # None: every work is one run
) -> Launches | None:
    """Like `sweeps`, for works that are cut by `cutting`. None if a tensor is not contiguous."""
    columns = columns_of(parts, codecs)
    if not columns.grads:
        return Launches([])
    device = columns.grads[0].device

    def new() -> _KnownCall:
        return _KnownCall(device, {}, DeviceTables(device, capacity=8))

    key = columns.key(codecs), None if cutting is None else cutting.key
    known = known_calls(device).get(key, new, of=columns.tensors)
    return known.launches.get(columns.grads_at, lambda: _launches(known, columns, codecs, cutting))


@cache
def known_calls(device: torch.device) -> DeviceTables[_KnownCall]:
    """The cache of calls on `device`, shared by the whole process: an entry depends only on its key."""
    return DeviceTables(device, capacity=CALLS)


def _parts(
    columns: Columns, codecs: Mapping[str, StateCodec], cutting: Cutting | None, device: torch.device
) -> list[_Part] | None:
    """The works by format, with their records on the device. None if some cannot be swept without a copy."""
    items = columns.items(codecs)
    if not are_in_order(items, len(codecs)):
        return None
    by_formats: dict[LaunchFormats, list[Cut]] = {}
    for index, item in enumerate(items):
        if numel := item.work.grad.numel():
            check_item(item, codecs, device)
            cuts = [Cut(index, 0, numel, item.work.first)] if cutting is None else list(cutting.runs(index, numel))
            by_formats.setdefault(_formats(item, cuts, codecs), []).extend(cuts)
    tagged = cutting is not None
    return [_part(formats, tuple(cuts), items, codecs, device, tagged) for formats, cuts in by_formats.items()]


def _addresses(item: Item, piece: Cut, codecs: Mapping[str, StateCodec]) -> list[int]:
    """Address of the first element of the run in each column."""
    addresses = []
    for tensor, elements in zip(item.tensors, names_of_columns(codecs).values()):
        addresses.append(0 if tensor is None else tensor.data_ptr() + piece.begin // elements * tensor.itemsize)
    return addresses


def _formats(item: Item, cuts: Sequence[Cut], codecs: Mapping[str, StateCodec]) -> LaunchFormats:
    """The formats common to all runs of a work. Block scales are read one at a time, so they need no alignment."""
    main, out, *states = item.tensors
    assert main is not None
    grad = item.work.grad
    places = 0
    for piece in cuts:
        places |= reduce(or_, _addresses(item, piece, codecs)[: 2 + len(codecs)])
        places |= piece.beside | (grad.data_ptr() + piece.begin * grad.itemsize)
    return LaunchFormats(
        grad=grad.dtype,
        main=main.dtype,
        out=None if out is None else out.dtype,
        states=tuple(state.dtype for state in states[: len(codecs)] if state is not None),
        aligned=places % ALIGNMENT == 0,
        remainder=item.work.main is None,
    )


def _part(
    formats: LaunchFormats,
    cuts: tuple[Cut, ...],
    items: Sequence[Item],
    codecs: Mapping[str, StateCodec],
    device: torch.device,
    tagged: bool,
) -> _Part:
    numels = tuple(c.numel for c in cuts)
    extents = Extents(numels, tuple(items[c.work].row for c in cuts), tuple(c.first for c in cuts))
    columns = []
    for tensor, elements in zip(items[cuts[0].work].tensors, names_of_columns(codecs).values()):
        columns.append(Column(item_bytes=0 if tensor is None else tensor.itemsize, elements=elements))
    addresses = list(zip(*(_addresses(items[c.work], c, codecs) for c in cuts)))
    if tagged:
        columns.append(Column(item_bytes=0))
        addresses.append(tuple(c.tag for c in cuts))
    chunk = chunk_elements(sum(numels), processors=processors(device))
    records = chunk_records(addresses, columns, extents, chunk=chunk)
    chunks = cut(numels, chunk)
    grad_bytes = formats.grad.itemsize
    works = torch.tensor([c.work for c in cuts], dtype=torch.int64, device="cpu")
    begins = moved([c.begin * grad_bytes for c in cuts], chunks, Column(item_bytes=grad_bytes))
    return _Part(formats, cuts, to_device(records, device), chunk, works[chunks.run], begins)


def _launches(
    known: _KnownCall, columns: Columns, codecs: Mapping[str, StateCodec], cutting: Cutting | None
) -> Launches | None:
    """The launches of all parts, with the current addresses of gradients."""
    aligned = None
    if reduce(or_, columns.grads_at) % ALIGNMENT:
        aligned = tuple([at % ALIGNMENT == 0 for at in columns.grads_at])
    if aligned not in known.parts:
        known.parts[aligned] = _parts(columns, codecs, cutting, known.device)
    parts = known.parts[aligned]
    if parts is None:
        return None
    grads_at = torch.tensor(columns.grads_at, dtype=torch.int64, device="cpu")
    launches = []
    for part in parts:
        column = to_device(grads_at[part.work_of_chunk] + part.bytes_to_chunk, known.device)
        launches.append(Launch(part.formats, ChunkTable(part.records, column, part.chunk), part.cuts))
    return launches
