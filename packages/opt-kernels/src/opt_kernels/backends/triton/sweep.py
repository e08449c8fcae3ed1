"""Launches elementwise Triton sweeps for batches of works: one launch per combination of dtypes, over all groups.

The tables of a launch are cached by the addresses and layouts of its tensors. The look-up is most of the host's work in
a step: it processes whole columns and creates no object per tensor.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache, reduce
from itertools import chain
from operator import attrgetter, or_
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels import devices
from opt_kernels.backends.elements import LayoutError, Run, check_halves, run_of
from opt_kernels.backends.triton.formats import ALIGNMENT, BLOCK, NUM_WARPS, LaunchFormats, value_dtype
from opt_kernels.backends.triton.jit import tl
from opt_kernels.backends.triton.layouts import Layouts
from opt_kernels.backends.triton.multi_tensor import (
    ChunkTable,
    Column,
    DeviceTables,
    Extents,
    chunk_elements,
    chunk_records,
    cut,
    moved,
    to_device,
)
from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.works import Batch, Work, Works

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


class Launches(list[Launch]):
    """The launches of a call. `derived` is for what a caller computes from their tables, and lives as long as these."""

    __slots__ = ("derived",)

    def __init__(self, launches: Iterable[Launch]) -> None:
        super().__init__(launches)
        self.derived: dict[Hashable, Any] = {}


Cutting = Callable[[int, int], Iterable[Cut]]  # arguments: index of a work and its number of elements


class _Part(NamedTuple):
    """The data of one launch that stays valid while tensors stay in place."""

    formats: LaunchFormats
    cuts: tuple[Cut, ...]
    records: Tensor
    chunk: int
    work_of_chunk: Tensor  # (num_chunks,) int64 on the host
    bytes_to_chunk: Tensor  # (num_chunks,) int64 on the host, from the start of the gradient


class _Found(NamedTuple):
    """All launches of a call; None if some tensor is not in row-major order."""

    launches: Launches | None


class _KnownCall(NamedTuple):
    """Cached data of a call, valid while its tensors, except the gradients, stay in place."""

    layouts: Layouts  # of all tensors, gradients included
    parts: dict[tuple[bool, ...] | None, list[_Part] | None]  # key: whether each gradient is aligned; None if all are
    launches: DeviceTables[_Found]  # by the addresses of the gradients


class _Call(NamedTuple):
    """All works of a call, column by column."""

    pieces: list[tuple[int, Works]]  # with their rows of the scalar block
    grads: list[Tensor]
    others: list[Tensor]
    grads_at: tuple[int, ...]  # addresses
    others_at: tuple[int, ...]


def launch(
    kernel: Any,  # a sweep: records, gradient column, scalar block, then keywords
    batches: Sequence[Batch],
    codecs: Mapping[str, StateCodec],  # of the states, in the order of their columns
    options: Callable[[LaunchFormats], dict[str, Any]],  # what the kernel takes in addition to `launch_options`
    scalar_block: Callable[[torch.device], Tensor],  # a row for each batch
) -> None:
    """Launch `kernel` once for every combination of dtypes among the works, without synchronizing."""
    found = cut_sweeps(_pieces(batches), codecs)
    if found is None:
        # The table holds addresses only: the copies must live until the launch.
        batches = in_order(batches)
        found = sweeps(batches, codecs)
    if not found:
        return
    device = found[0].table.grads.device
    with devices.launching_on(device):
        block = scalar_block(device)
        for formats, table, _ in found:
            kernel[(table.num_chunks,)](
                table.records, table.grads, block, **options(formats), **launch_options(formats, table)
            )


def launch_options(formats: LaunchFormats, table: ChunkTable) -> dict[str, Any]:
    """The keyword arguments common to all sweeps: formats, shape of the launch, compiler options."""
    return {**_constants(formats), "WIDTH": table.records.shape[1], "CHUNK": table.chunk}


@cache
def _constants(formats: LaunchFormats) -> dict[str, Any]:
    return {
        "GRAD": value_dtype(formats.grad),
        "MAIN": tl.int16 if formats.main is None else value_dtype(formats.main),
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
    found = cut_sweeps(_pieces(batches), codecs)
    if found is None:
        raise LayoutError("a work has tensors that are not contiguous; pass contiguous tensors")
    return found


def in_order(batches: Sequence[Batch]) -> list[Batch]:
    """The works as flat runs. A gradient whose memory order differs from its main's is copied.

    Raises LayoutError if a tensor to be written has holes.
    """
    return [Batch(hyper, [_work(run_of(work)) for work in works]) for hyper, works in batches]


def cut_sweeps(
    pieces: list[tuple[int, Works]],  # with their rows of the scalar block
    codecs: Mapping[str, StateCodec],
    cutting: Cutting | None = None,  # None: every work is one run
    cut_by: Hashable = None,  # what `cutting` depends on, apart from the sizes of the works
) -> Launches | None:
    """Like `sweeps`, for works that are cut by `cutting`. None if a tensor is not contiguous."""
    if pieces and all(works.unchanged is not None and len(works) > 0 for _, works in pieces):
        return _unchanged_sweeps(pieces, codecs, cutting, cut_by)
    call = _call(pieces, codecs)
    if not call.grads:
        return Launches([])
    device = call.grads[0].device
    known = known_calls(device).get(
        _key(call, codecs, cut_by),
        lambda: _new_known(call, device),
        holds=lambda known: known.layouts.same(_tensors(call)),
    )
    found = known.launches.get(call.grads_at, lambda: _Found(_launches(known, call, codecs, cutting, device)))
    return found.launches


def _unchanged_sweeps(
    pieces: list[tuple[int, Works]], codecs: Mapping[str, StateCodec], cutting: Cutting | None, cut_by: Hashable
) -> Launches | None:
    """Like `cut_sweeps`, for works whose tensors have not moved: only the addresses of gradients are compared."""
    first = pieces[0][1]
    device = first.grads[0].device
    found = first.unchanged.cache if first.unchanged is not None else {}
    which = (tuple([(row, works.unchanged) for row, works in pieces]), tuple(codecs.items()), cut_by)
    placed: _Placed | None = found.get(which)
    key = _key(_call(pieces, codecs), codecs, cut_by) if placed is None else placed.key
    known = known_calls(device).get(
        key,
        lambda: _new_known(_call(pieces, codecs), device),
        # Other code may have swept the same memory with another layout since then.
        holds=lambda known: (
            (placed is not None and known is placed.known) or known.layouts.same(_tensors(_call(pieces, codecs)))
        ),
    )
    if placed is None or known is not placed.known:
        found[which] = _Placed(key, known)
    grads_at = first.grads_at if len(pieces) == 1 else tuple(chain.from_iterable(works.grads_at for _, works in pieces))
    placed_at = known.launches.get(
        grads_at, lambda: _Found(_launches(known, _call(pieces, codecs), codecs, cutting, device))
    )
    return placed_at.launches


class _Placed(NamedTuple):
    """The cached result of a look-up for works with fixed tensors."""

    key: Hashable  # in `known_calls`
    known: _KnownCall


def _key(call: _Call, codecs: Mapping[str, StateCodec], cut_by: Hashable) -> Hashable:
    kinds = tuple([(row, len(w), w.mains is None, w.outs is None, w.firsts) for row, w in call.pieces])
    return call.others_at, kinds, tuple(codecs.items()), cut_by


def _tensors(call: _Call) -> tuple[Tensor, ...]:
    return (*call.grads, *call.others)


def _new_known(call: _Call, device: torch.device) -> _KnownCall:
    return _KnownCall(Layouts(_tensors(call)), {}, DeviceTables(device, capacity=8))


@cache
def known_calls(device: torch.device) -> DeviceTables[_KnownCall]:
    """The cache of calls on `device`, shared by the whole process: an entry depends only on its key."""
    return DeviceTables(device, capacity=CALLS)


def _pieces(batches: Sequence[Batch]) -> list[tuple[int, Works]]:
    return [(row, works) for row, batch in enumerate(batches) for works in uniform(batch.works)]


_FIELDS = attrgetter("grad", "main", "state", "out", "remainder", "matrix", "first")


def uniform(works: Sequence[Work]) -> list[Works]:
    """`works` as columns, grouped by whether they have a main and an out."""
    if isinstance(works, Works) or not works:
        return [works] if isinstance(works, Works) else []
    grads, mains, states, outs, remainders, matrices, firsts = zip(*map(_FIELDS, works))
    kinds = [set(map(type, column)) for column in (mains, outs)]
    if any(NoneType in types and len(types) > 1 for types in kinds):
        by_kind: dict[tuple[bool, bool], list[Work]] = {}
        for work in works:
            by_kind.setdefault((work.main is None, work.out is None), []).append(work)
        return [one for of_kind in by_kind.values() for one in uniform(of_kind)]
    return [
        Works(
            grads,
            mains=None if mains[0] is None else mains,
            states=states,
            outs=None if outs[0] is None else outs,
            remainders=None if mains[0] is not None else remainders,
            matrices=matrices,
            firsts=firsts,
        )
    ]


def _work(run: Run) -> Work:
    return Work(
        grad=run.grad, main=run.main, state=run.state, out=run.out, remainder=run.remainder, first=run.first
    )  # fmt: skip


def _call(pieces: list[tuple[int, Works]], codecs: Mapping[str, StateCodec]) -> _Call:
    """Tensors and addresses by column. Runs in every step, so it processes whole columns at a time."""
    grads: list[Tensor] = []
    others: list[Tensor] = []
    for _, works in pieces:
        grads += works.grads
        for column in _columns(works, codecs):
            if column is not None:
                others += column
    return _Call(pieces, grads, others, tuple(map(Tensor.data_ptr, grads)), tuple(map(Tensor.data_ptr, others)))


def _columns(works: Works, codecs: Mapping[str, StateCodec]) -> list[Sequence[Tensor] | None]:
    """The columns of `works`: main or remainder, out, states, scales. None for an out that works do not have."""
    if works.mains is None and (works.outs is None or works.remainders is None):
        raise LayoutError("a work has no main: pass main, or out (bfloat16) and its remainder (int16)")
    columns: list[Sequence[Tensor] | None] = [works.remainders if works.mains is None else works.mains, works.outs]
    columns += [[state[name] for state in works.states] for name in codecs]
    return columns + [[state[scale_name(name)] for state in works.states] for name in codecs if codecs[name].block]


def _names(codecs: Mapping[str, StateCodec]) -> dict[str, int]:
    """Names of the columns, and the number of parameter elements per entry of each."""
    scales = {scale_name(name): codec.block for name, codec in codecs.items() if codec.block}
    return {"main": 1, "out": 1} | dict.fromkeys(codecs, 1) | scales


class _Item(NamedTuple):
    """One work of a call."""

    row: int
    first: int
    grad: Tensor
    columns: list[Tensor | None]
    remainder: bool


def _items(call: _Call, codecs: Mapping[str, StateCodec]) -> list[_Item]:
    items = []
    for row, works in call.pieces:
        columns = _columns(works, codecs)
        for i, grad in enumerate(works.grads):
            of_work = [None if column is None else column[i] for column in columns]
            items.append(_Item(row, 0 if works.firsts is None else works.firsts[i], grad, of_work, works.mains is None))
    return items


def _parts(
    call: _Call, codecs: Mapping[str, StateCodec], cutting: Cutting | None, device: torch.device
) -> list[_Part] | None:
    """The works by format, with their records on the device. None if some cannot be swept without a copy."""
    items = _items(call, codecs)
    if not all(lies_in_order(tensor) for item in items for tensor in (item.grad, *item.columns) if tensor is not None):
        return None
    by_formats: dict[LaunchFormats, list[Cut]] = {}
    for index, item in enumerate(items):
        if item.grad.numel():
            _check(item, codecs, device)
            numel = item.grad.numel()
            cuts = [Cut(index, 0, numel, item.first)] if cutting is None else list(cutting(index, numel))
            by_formats.setdefault(_formats(item, cuts, codecs), []).extend(cuts)
    tagged = cutting is not None
    return [_part(formats, tuple(cuts), items, codecs, device, tagged) for formats, cuts in by_formats.items()]


def lies_in_order(tensor: Tensor) -> bool:
    """Whether `tensor` is contiguous and its memory holds its values: a view with the negative bit set does not."""
    return tensor.is_contiguous() and not tensor.is_neg()


def _addresses(item: _Item, piece: Cut, codecs: Mapping[str, StateCodec]) -> list[int]:
    """Address of the first element of the run in each column."""
    return [
        0 if tensor is None else tensor.data_ptr() + piece.begin // elements * tensor.itemsize
        for tensor, elements in zip(item.columns, _names(codecs).values())
    ]


def _formats(item: _Item, cuts: Sequence[Cut], codecs: Mapping[str, StateCodec]) -> LaunchFormats:
    """The formats common to all runs of a work. Block scales are read one at a time, so they need no alignment."""
    main, out, *states = item.columns
    kept = 2 + len(codecs)
    places = [at for c in cuts for at in (*_addresses(item, c, codecs)[:kept], c.beside)]
    places += [item.grad.data_ptr() + c.begin * item.grad.itemsize for c in cuts]
    return LaunchFormats(
        grad=item.grad.dtype,
        main=None if item.remainder or main is None else main.dtype,
        out=None if out is None else out.dtype,
        states=tuple(state.dtype for state in states[: len(codecs)] if state is not None),
        aligned=reduce(or_, places) % ALIGNMENT == 0,
    )


def _part(
    formats: LaunchFormats,
    cuts: tuple[Cut, ...],
    items: Sequence[_Item],
    codecs: Mapping[str, StateCodec],
    device: torch.device,
    tagged: bool,
) -> _Part:
    numels = tuple(c.numel for c in cuts)
    extents = Extents(numels, tuple(items[c.work].row for c in cuts), tuple(c.first for c in cuts))
    columns = [
        Column(item_bytes=0 if tensor is None else tensor.itemsize, elements=elements)
        for tensor, elements in zip(items[cuts[0].work].columns, _names(codecs).values())
    ]
    addresses = list(zip(*(_addresses(items[c.work], c, codecs) for c in cuts)))
    if tagged:
        columns.append(Column(item_bytes=0))
        addresses.append(tuple(c.tag for c in cuts))
    chunk = chunk_elements(sum(numels), processors=processors(device))
    records = chunk_records(addresses, columns, extents, chunk=chunk)
    chunks = cut(numels, chunk)
    begins = [c.begin * formats.grad.itemsize for c in cuts]
    return _Part(
        formats,
        cuts,
        to_device(records, device),
        chunk,
        torch.tensor([c.work for c in cuts])[chunks.run],
        moved(begins, chunks, Column(item_bytes=formats.grad.itemsize)),
    )


def _launches(
    known: _KnownCall, call: _Call, codecs: Mapping[str, StateCodec], cutting: Cutting | None, device: torch.device
) -> Launches | None:
    """The launches of all parts, with the current addresses of gradients."""
    aligned = None
    if reduce(or_, call.grads_at) % ALIGNMENT:
        aligned = tuple([at % ALIGNMENT == 0 for at in call.grads_at])
    if aligned not in known.parts:
        known.parts[aligned] = _parts(call, codecs, cutting, device)
    parts = known.parts[aligned]
    if parts is None:
        return None
    grads_at = torch.tensor(call.grads_at)
    columns = [to_device(grads_at[part.work_of_chunk] + part.bytes_to_chunk, device) for part in parts]
    return Launches(
        Launch(part.formats, ChunkTable(part.records, column, part.chunk), part.cuts)
        for part, column in zip(parts, columns)
    )


def _check(item: _Item, codecs: Mapping[str, StateCodec], device: torch.device) -> None:
    numel = item.grad.numel()
    if item.remainder:
        remainder, out = item.columns[:2]
        check_halves(Work(grad=item.grad, main=None, out=out, remainder=remainder, state={}))
    for (name, elements), tensor in zip(_names(codecs).items(), item.columns):
        if tensor is None:
            continue
        if tensor.device != device or item.grad.device != device:
            raise LayoutError(f"{name} is on {tensor.device} and a gradient on {device}; one sweep has one device")
        expected = math.ceil(numel / elements)
        if tensor.numel() != expected:
            raise LayoutError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()} with a gradient of shape "
                f"{tuple(item.grad.shape)}; allowed is a contiguous tensor of {expected} elements"
            )
