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

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.elements import (
    Columns,
    Item,
    LayoutError,
    Parts,
    are_in_order,
    check_item,
    columns_of,
    names_of_columns,
    parts_of,
)
from opt_kernels.backends.tables import DeviceTables, to_device
from opt_kernels.backends.triton.formats import ALIGNMENT, BLOCK, NUM_WARPS, LaunchFormats, triton_dtype, value_dtype
from opt_kernels.codecs import Codecs
from opt_kernels.works import Batch

LINE = 8  # int64 per 64-byte memory line; a record takes one line, or two
TRAILING = 3  # elements, row, first: after the addresses
MIN_CHUNK = 2048
MAX_CHUNK = 16384
PROGRAMS_PER_PROCESSOR = 16  # enough that the last, partly filled wave of programs costs little


class ChunkTable(NamedTuple):
    """Chunk records on the device of the tensors they describe."""

    records: Tensor  # (num_chunks, 8 or 16) int64
    grads: Tensor  # (num_chunks,) int64, the address of each chunk's gradient
    chunk: int  # elements in a full chunk

    @property
    def num_chunks(self) -> int:
        return self.grads.shape[0]


def chunk_elements(total: int, device: torch.device) -> int:
    """Elements per chunk: a power of two, large when there is much to do, small enough to occupy every processor."""
    processors = 1  # the interpreter runs programs one after the other
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    share = total // (PROGRAMS_PER_PROCESSOR * processors)
    return min(MAX_CHUNK, max(MIN_CHUNK, 1 << max(share, 1).bit_length() - 1))


class Chunks(NamedTuple):
    """Runs cut into chunks, (num_chunks,) int64 each, on the host."""

    run: Tensor  # which run the chunk is cut from
    start: Tensor  # its first element within the run
    numel: Tensor

    def at(self, of_runs: Sequence[int], *, item_bytes: int = 0, elements: int = 1) -> Tensor:
        """The number of the run of each chunk. As an address it moves to the start of the chunk: by `item_bytes` for
        every `elements` of the parameter, which are a block where a column holds one scale per block."""
        return torch.tensor(of_runs, dtype=torch.int64, device="cpu")[self.run] + self.start // elements * item_bytes


def cut(numels: Sequence[int], chunk: int) -> Chunks:
    """Chunks of every run in order; an empty run has none."""
    lengths = torch.tensor(numels, dtype=torch.int64, device="cpu")
    counts = (lengths + chunk - 1) // chunk
    run = torch.repeat_interleave(torch.arange(len(numels), dtype=torch.int64, device="cpu"), counts)
    before = torch.cumsum(counts, 0) - counts
    index = torch.arange(len(run), dtype=torch.int64, device="cpu") - before[run]
    start = index * chunk
    return Chunks(run, start, (lengths[run] - start).clamp(max=chunk))


def chunk_records(
    chunks: Chunks,
    columns: Sequence[Tensor],  # for each column, the address of every chunk
    *,
    rows: Sequence[int],  # of every run: the row of the scalar block that updates it
    # Global index of its element 0, which seeds stochastic rounding: results do not depend on how a tensor is cut.
    firsts: Sequence[int],
) -> Tensor:
    """The records of all chunks, (num_chunks, 8 or 16) int64 on the host: whole lines, where unused lanes are zero."""
    width = -(-(len(columns) + TRAILING) // LINE) * LINE
    records = torch.zeros(len(chunks.run), width, dtype=torch.int64, device="cpu")
    for lane, addresses in enumerate(columns):
        records[:, lane] = addresses
    records[:, -3] = chunks.numel
    records[:, -2] = chunks.at(rows)
    records[:, -1] = chunks.at(firsts, item_bytes=1)
    return records


CALLS = 1024  # a step has one per launch group, Muon one per round; calls that do not fit are rebuilt every step


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
    is_ieee = formats.ieee
    return {
        "GRAD": value_dtype(formats.grad),
        "MAIN": (triton_dtype if formats.remainder else value_dtype)(formats.main),
        "OUT": None if formats.out is None else value_dtype(formats.out),
        "REMAINDER": formats.remainder,
        "IEEE": is_ieee,
        "BLOCK": BLOCK,
        "E": formats.vector,
        "num_warps": NUM_WARPS,
        # Always explicit: the default differs between versions of Triton and changes the bits of the result.
        "enable_fp_fusion": not is_ieee,
    }


def sweeps(batches: Sequence[Batch], codecs: Codecs) -> Launches:
    """One launch for every combination of dtypes among the works. Empty works are left out.

    Columns: main or remainder, out, the states, then the scales of the states that have scales. Raises LayoutError if
    tensors are on different devices or not contiguous.
    """
    found = cut_sweeps(parts_of(batches), codecs)
    if found is None:
        raise LayoutError("a work has tensors that are not contiguous; pass contiguous tensors")
    return found


def cut_sweeps(
    parts: Parts,  # with their rows of the scalar block
    codecs: Codecs,
    cutting: Cutting | None = None,  # None: every work is one run
) -> Launches | None:
    """Like `sweeps`, for works that are cut by `cutting`. None if a tensor is not contiguous."""
    columns = columns_of(parts, codecs)
    if not columns.grads:
        return []
    device = columns.grads[0].device
    key = (columns.key(codecs), None if cutting is None else cutting.key)
    known = known_calls(device).get(
        key, lambda: _KnownCall(device, {}, DeviceTables(device, capacity=8)), of=columns.tensors
    )
    return known.launches.get(columns.grads_at, lambda: _launches(known, columns, codecs, cutting))


@cache
def known_calls(device: torch.device) -> DeviceTables[_KnownCall]:
    """The cache of calls on `device`, shared by the whole process: an entry depends only on its key."""
    return DeviceTables(device, capacity=CALLS)


def _parts(columns: Columns, codecs: Codecs, cutting: Cutting | None, device: torch.device) -> list[_Part] | None:
    """The works by format, with their records on the device. None if some cannot be swept without a copy."""
    items = columns.items(codecs)
    if not are_in_order(items, len(codecs)):
        return None
    by_formats: dict[LaunchFormats, list[Cut]] = {}
    for index, item in enumerate(items):
        numel = item.work.grad.numel()
        if not numel:
            continue
        check_item(item, codecs, device)
        cuts = [Cut(index, 0, numel, item.work.first)] if cutting is None else list(cutting.runs(index, numel))
        by_formats.setdefault(_formats(item, cuts, codecs), []).extend(cuts)
    parts = []
    for formats, all_cuts in by_formats.items():
        tags = [] if cutting is None else [c.tag for c in all_cuts]
        parts.append(_part(formats, all_cuts, items, codecs, tags))
    return parts


def _addresses(item: Item, piece: Cut, codecs: Codecs) -> list[int]:
    """Address of the first element of the run in each column."""
    addresses = []
    for tensor, elements in zip(item.tensors, names_of_columns(codecs).values()):
        addresses.append(0 if tensor is None else tensor.data_ptr() + piece.begin // elements * tensor.itemsize)
    return addresses


def _formats(item: Item, cuts: Sequence[Cut], codecs: Codecs) -> LaunchFormats:
    """The formats common to all runs of a work. Block scales are read one at a time, so they need no alignment."""
    num_states = len(codecs)
    main, out, *states = item.tensors
    assert main is not None
    grad = item.work.grad
    places = 0  # the bits of all addresses
    for c in cuts:
        aligned = _addresses(item, c, codecs)[: 2 + num_states]
        places = reduce(or_, aligned, places | c.beside | grad.data_ptr() + c.begin * grad.itemsize)
    out_dtype = None if out is None else out.dtype
    state_dtypes = tuple(state.dtype for state in states[:num_states] if state is not None)
    is_aligned = places % ALIGNMENT == 0
    return LaunchFormats(
        grad.dtype, main.dtype, out_dtype, state_dtypes, aligned=is_aligned, remainder=item.work.main is None
    )


def _part(
    formats: LaunchFormats,
    cuts: Sequence[Cut],
    items: Sequence[Item],
    codecs: Codecs,
    tags: Sequence[int],  # of the cuts; empty: records have none
) -> _Part:
    device = items[cuts[0].work].work.grad.device
    numels = [c.numel for c in cuts]
    chunk = chunk_elements(sum(numels), device)
    chunks = cut(numels, chunk)
    by_column = zip(*(_addresses(items[c.work], c, codecs) for c in cuts))
    kinds = zip(items[cuts[0].work].tensors, names_of_columns(codecs).values())
    columns = []
    for addresses, (tensor, elements) in zip(by_column, kinds):
        columns.append(chunks.at(addresses, item_bytes=0 if tensor is None else tensor.itemsize, elements=elements))
    if tags:
        columns.append(chunks.at(tags))
    records = chunk_records(chunks, columns, rows=[items[c.work].row for c in cuts], firsts=[c.first for c in cuts])
    grad_bytes = formats.grad.itemsize
    bytes_to_chunk = chunks.at([c.begin * grad_bytes for c in cuts], item_bytes=grad_bytes)
    work_of_chunk = chunks.at([c.work for c in cuts])
    return _Part(formats, tuple(cuts), to_device(records, device), chunk, work_of_chunk, bytes_to_chunk)


def _launches(known: _KnownCall, columns: Columns, codecs: Codecs, cutting: Cutting | None) -> Launches | None:
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
        addresses = to_device(grads_at[part.work_of_chunk] + part.bytes_to_chunk, known.device)
        launches.append(Launch(part.formats, ChunkTable(part.records, addresses, part.chunk), part.cuts))
    return launches
