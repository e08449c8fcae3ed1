"""From batches of works to launches of an elementwise Triton sweep: one per combination of dtypes, over all groups."""

import math
from collections.abc import Hashable, Sequence
from functools import cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.jit import tl
from opt_kernels.multi_tensor import (
    ChunkTable,
    Column,
    DeviceTables,
    Extents,
    chunk_elements,
    chunk_records,
    gradient_column,
    to_device,
)
from opt_kernels.ops.elements import LayoutError, Run, run_of
from opt_kernels.rules.base import Batch, Work

BLOCK = 1024  # elements a program handles at a time: 8 for each lane of 4 warps
NUM_WARPS = 4
ALIGNMENT = 16  # bytes; below it a tensor is swept one element at a time
IEEE_BYTES = 18  # bytes per element from which on exact division hides behind the memory traffic
PROCESSORS_OF_A_CPU = 1  # the interpreter runs programs one after the other


class Formats(NamedTuple):
    """What a launch is compiled for: the dtype of every column, and whether all of them are aligned."""

    grad: torch.dtype
    main: torch.dtype | None  # None: the main is joined from out and remainder
    out: torch.dtype | None
    states: tuple[torch.dtype, ...]  # of the values or codes; scales are float32
    aligned: bool

    @property
    def remainder(self) -> bool:
        return self.main is None

    @property
    def vector(self) -> int:
        """Elements that every pointer is aligned to.

        One number for all columns: were each to take its own 16 bytes, 16-bit and 32-bit tiles would differ in layout,
        and every one of them would pass through shared memory.
        """
        if not self.aligned:
            return 1
        widest = max(d.itemsize for d in (self.grad, self.main or torch.int16, self.out or torch.int16, *self.states))
        return 4 if widest > 2 else 8

    @property
    def bytes_moved(self) -> int:
        """Read and written per element, block scales aside."""
        main = 2 * self.main.itemsize if self.main is not None else 2 * torch.int16.itemsize
        out = 0 if self.out is None else self.out.itemsize * (2 if self.remainder else 1)
        return self.grad.itemsize + main + out + 2 * sum(d.itemsize for d in self.states)

    @property
    def ieee(self) -> bool:
        return self.bytes_moved >= IEEE_BYTES


class Sweep(NamedTuple):
    """One launch: what to compile for, and the table of what to work on."""

    formats: Formats
    table: ChunkTable
    # The table holds addresses only: a gradient that had to be rearranged would be gone before its launch.
    works: Sequence[Work | Run]


class _Part(NamedTuple):
    """The works of one launch, as far as it does not change while tensors stay where they are."""

    formats: Formats
    members: tuple[int, ...]  # which works, by their place in the call
    records: Tensor
    chunk: int
    grads: DeviceTables[Tensor]  # gradient columns, by the addresses of the gradients


class _Call(NamedTuple):
    """All works of a call, column by column."""

    works: list[Work | Run]
    rows: tuple[int, ...]  # of the scalar block, one per work
    grads: list[Tensor]
    columns: list[list[Tensor | None]]  # main or remainder, out, states, scales
    names: tuple[str, ...]  # of the columns
    blocks: tuple[int, ...]  # elements per entry of each column
    grads_at: list[int]  # addresses
    columns_at: list[list[int]]


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """What tensors of `dtype` are in Triton. Raises LayoutError for one that a sweep does not know."""
    names = {
        torch.float32: tl.float32,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
        torch.int16: tl.int16,
        torch.int8: tl.int8,
        torch.uint8: tl.uint8,
        torch.float8_e4m3fn: tl.uint8,  # bytes: see ops/quantize/triton.py
    }
    if dtype not in names:
        allowed = ", ".join(map(str, names))
        raise LayoutError(f"the triton backend cannot sweep {dtype}; allowed are {allowed}; use backend='torch'")
    return names[dtype]


def launch_options(formats: Formats, table: ChunkTable) -> dict[str, Any]:
    """The arguments that every sweep takes by these names: formats, shape of the launch, compiler options."""
    return {
        "GRAD": triton_dtype(formats.grad),
        "MAIN": tl.int16 if formats.main is None else triton_dtype(formats.main),
        "OUT": None if formats.out is None else triton_dtype(formats.out),
        "REMAINDER": formats.remainder,
        "IEEE": formats.ieee,
        "WIDTH": table.records.shape[1],
        "CHUNK": table.chunk,
        "BLOCK": BLOCK,
        "E": formats.vector,
        "num_warps": NUM_WARPS,
        # Said at every launch: the default changes between versions of Triton, and with it the bits of the result.
        "enable_fp_fusion": not formats.ieee,
    }


def rounds_by_chance(formats: Formats, wanted: bool) -> bool:
    """Whether stochastic rounding, if wanted, has anything to round. Raises LayoutError where it cannot."""
    if wanted and formats.main is torch.float16:
        raise LayoutError(
            "stochastic_rounding=True with a float16 main: only bfloat16 is rounded by chance; "
            "keep a float32 main beside float16 parameters, or give stochastic_rounding=False"
        )
    return wanted and formats.main is torch.bfloat16


def processors(device: torch.device) -> int:
    """How many programs run at the same time, roughly."""
    if device.type != "cuda":
        return PROCESSORS_OF_A_CPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def sweeps(
    batches: Sequence[Batch],
    states: Sequence[tuple[str, StateCodec]],  # names and codecs, in the order of their columns
) -> list[Sweep]:
    """One sweep for every combination of dtypes among the works; empty works take part in none.

    Columns: main or remainder, out, the states, then the scales of those that have any. Raises LayoutError where
    tensors are not of one device, or have holes.
    """
    works = _in_order([work for batch in batches for work in batch.works])
    if not works:
        return []
    call = _columns(works, tuple(row for row, batch in enumerate(batches) for _ in batch.works), states)
    device = call.grads[0].device
    parts = known_parts(device).get(_fingerprint(call), lambda: _parts(call, device))
    return [_sweep(part, call, device) for part in parts]


@cache
def known_parts(device: torch.device) -> DeviceTables[list[_Part]]:
    """The parts known on `device`: one collection for the process, since what is in it is true for whoever asks."""
    return DeviceTables(device)


def _in_order(works: list[Work]) -> list[Work | Run]:
    """The works, those in another order than C's as flat runs, in which a gradient may be a rearranged copy."""
    anchors = [work.out if work.main is None else work.main for work in works]
    if all(work.grad.is_contiguous() for work in works) and all(a is None or a.is_contiguous() for a in anchors):
        return list(works)
    return [run_of(work) for work in works]


def _columns(works: list[Work | Run], rows: tuple[int, ...], states: Sequence[tuple[str, StateCodec]]) -> _Call:
    """Tensors and addresses by column; this runs at every step, hence whole columns at a time."""
    scales = {scale_name(name): codec.block for name, codec in states if codec.block}
    names = (*(name for name, _ in states), *scales)
    grads = [work.grad for work in works]
    columns: list[list[Tensor | None]] = [
        [work.remainder if work.main is None else work.main for work in works],
        [work.out for work in works],
    ]
    for name in names:
        columns.append([work.state[name] for work in works])
    return _Call(
        works=works,
        rows=rows,
        grads=grads,
        columns=columns,
        names=("main", "out", *names),
        blocks=(1, 1, *(scales.get(name, 1) for name in names)),
        grads_at=[grad.data_ptr() for grad in grads],
        columns_at=[[0 if tensor is None else tensor.data_ptr() for tensor in column] for column in columns],
    )


def _fingerprint(call: _Call) -> tuple[Hashable, ...]:
    """All that the parts depend on: everything but the addresses of gradients, of which only the alignment counts."""
    misaligned = reduce(or_, call.grads_at) % ALIGNMENT
    return (
        tuple([grad.numel() for grad in call.grads]),
        tuple([grad.dtype for grad in call.grads]),
        tuple([at % ALIGNMENT == 0 for at in call.grads_at]) if misaligned else None,
        tuple(map(tuple, call.columns_at)),
        tuple([None if tensor is None else tensor.dtype for column in call.columns for tensor in column]),
        tuple([work.main is None for work in call.works]),
        tuple([work.first for work in call.works]),
        call.rows,
        call.blocks,
    )


def _parts(call: _Call, device: torch.device) -> list[_Part]:
    """The works by format, each with its records on the device."""
    by_formats: dict[Formats, list[int]] = {}
    for index, grad in enumerate(call.grads):
        if grad.numel():
            _check(call, index, device)
            by_formats.setdefault(_formats(call, index), []).append(index)
    return [_part(formats, tuple(members), call, device) for formats, members in by_formats.items()]


def _formats(call: _Call, index: int) -> Formats:
    work = call.works[index]
    addresses = reduce(or_, (of_works[index] for of_works in call.columns_at), call.grads_at[index])
    states = [column[index] for column, block in zip(call.columns[2:], call.blocks[2:]) if block == 1]
    return Formats(
        grad=work.grad.dtype,
        main=None if work.main is None else work.main.dtype,
        out=None if work.out is None else work.out.dtype,
        states=tuple(state.dtype for state in states if state is not None),
        aligned=addresses % ALIGNMENT == 0,
    )


def _part(formats: Formats, members: tuple[int, ...], call: _Call, device: torch.device) -> _Part:
    numels = tuple(call.grads[i].numel() for i in members)
    extents = Extents(numels, tuple(call.rows[i] for i in members), tuple(call.works[i].first for i in members))
    firsts_of_columns = [column[members[0]] for column in call.columns]
    columns = [
        Column(item_bytes=0 if tensor is None else tensor.dtype.itemsize, elements=block)
        for tensor, block in zip(firsts_of_columns, call.blocks)
    ]
    addresses = [[of_works[i] for i in members] for of_works in call.columns_at]
    chunk = chunk_elements(sum(numels), processors=processors(device))
    records = to_device(chunk_records(addresses, columns, extents, chunk=chunk), device)
    return _Part(formats, members, records, chunk, DeviceTables(device, capacity=8))


def _sweep(part: _Part, call: _Call, device: torch.device) -> Sweep:
    """The part with its gradients where they are now."""
    addresses = tuple([call.grads_at[i] for i in part.members])

    def build() -> Tensor:
        numels = [call.grads[i].numel() for i in part.members]
        item_bytes = part.formats.grad.itemsize
        return to_device(gradient_column(addresses, numels, item_bytes=item_bytes, chunk=part.chunk), device)

    return Sweep(part.formats, ChunkTable(part.records, part.grads.get(addresses, build), part.chunk), call.works)


def _check(call: _Call, index: int, device: torch.device) -> None:
    numel = call.grads[index].numel()
    for name, column, block in zip(call.names, call.columns, call.blocks):
        tensor = column[index]
        if tensor is None:
            continue
        if tensor.device != device or call.grads[index].device != device:
            raise LayoutError(f"{name} is on {tensor.device} and a gradient on {device}; one sweep has one device")
        expected = math.ceil(numel / block)
        if not tensor.is_contiguous() or tensor.numel() != expected:
            raise LayoutError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()} beside a gradient of shape "
                f"{tuple(call.grads[index].shape)}; allowed is a contiguous tensor of {expected} elements"
            )
