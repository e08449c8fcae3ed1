"""From batches of works to launches of an elementwise Triton sweep: one per combination of dtypes, over all groups."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.jit import tl
from opt_kernels.multi_tensor import (
    ChunkTable,
    Column,
    Extents,
    chunk_elements,
    chunk_records,
    device_tables,
    gradient_column,
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


class _Member(NamedTuple):
    """A work, and the row of the scalar block that updates it."""

    work: Work | Run
    row: int


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

    Columns: main or remainder, out, the states, then the scales of those that have any.

    Raises LayoutError where tensors are not of one device, or have holes.
    """
    names = tuple(name for name, _ in states)
    blocks = {scale_name(name): codec.block for name, codec in states if codec.block}
    members = [
        _Member(_plain(work), row) for row, batch in enumerate(batches) for work in batch.works if work.grad.numel()
    ]
    by_formats: dict[Formats, list[_Member]] = {}
    for member in members:
        by_formats.setdefault(_formats(member.work, names), []).append(member)
    everything = (*names, *blocks)
    return [
        Sweep(formats, _table(formats, group, everything, blocks), [member.work for member in group])
        for formats, group in by_formats.items()
    ]


def _plain(work: Work) -> Work | Run:
    """The work itself where its tensors are contiguous, else its runs, in which a gradient may be a rearranged copy."""
    anchor = work.out if work.main is None else work.main
    if work.grad.is_contiguous() and anchor is not None and anchor.is_contiguous():
        return work
    return run_of(work)


def _columns(work: Work | Run, names: tuple[str, ...]) -> tuple[Tensor | None, ...]:
    """Main or remainder, out, states."""
    main = work.remainder if work.main is None else work.main
    return (main, work.out, *(work.state[name] for name in names))


def _formats(work: Work | Run, names: tuple[str, ...]) -> Formats:
    addresses = work.grad.data_ptr()
    for tensor in _columns(work, names):
        addresses |= 0 if tensor is None else tensor.data_ptr()
    return Formats(
        grad=work.grad.dtype,
        main=None if work.main is None else work.main.dtype,
        out=None if work.out is None else work.out.dtype,
        states=tuple(work.state[name].dtype for name in names),
        aligned=addresses % ALIGNMENT == 0,
    )


def _table(formats: Formats, group: list[_Member], names: tuple[str, ...], blocks: dict[str, int]) -> ChunkTable:
    works = [member.work for member in group]
    device = works[0].grad.device
    grads = tuple(work.grad.data_ptr() for work in works)
    lanes = [_columns(work, names) for work in works]
    addresses = tuple(tuple(0 if t is None else t.data_ptr() for t in lane) for lane in zip(*lanes))
    numels = tuple(work.grad.numel() for work in works)
    extents = Extents(numels, tuple(member.row for member in group), tuple(work.first for work in works))
    columns = tuple(
        Column(item_bytes=0 if t is None else t.dtype.itemsize, elements=blocks.get(name, 1))
        for name, t in zip(("main", "out", *names), lanes[0])
    )
    chunk = chunk_elements(sum(numels), processors=processors(device))
    tables = device_tables(device)

    def records() -> Tensor:
        _check(works, names, blocks, device)
        return chunk_records(addresses, columns, extents, chunk=chunk)

    def grad_column() -> Tensor:
        return gradient_column(grads, numels, item_bytes=formats.grad.itemsize, chunk=chunk)

    return ChunkTable(
        tables.get((addresses, columns, extents, chunk), records),
        tables.get((grads, numels, formats.grad.itemsize, chunk), grad_column),
        chunk,
    )


def _check(works: Sequence[Work | Run], names: tuple[str, ...], blocks: dict[str, int], device: torch.device) -> None:
    for work in works:
        for name, tensor in zip(("main", "out", *names), _columns(work, names)):
            if tensor is None:
                continue
            if tensor.device != device:
                raise LayoutError(f"{name} is on {tensor.device} and a gradient on {device}; one sweep has one device")
            numel = math.ceil(work.grad.numel() / blocks.get(name, 1))
            if not tensor.is_contiguous() or tensor.numel() != numel:
                raise LayoutError(
                    f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()} beside a gradient of shape "
                    f"{tuple(work.grad.shape)}; allowed is a contiguous tensor of {numel} elements"
                )
