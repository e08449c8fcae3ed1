"""Deterministic gradient statistics in one Triton sweep and one small sum, without synchronizing.

Reads 4 bytes per element of float32 gradients, 2 of 16-bit ones. Every program sums its chunk in float32, and one last
program adds the chunks in float64, both in a fixed order. `kernels/grad_stats.md` derives the design.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from opt_kernels.backends import reference
from opt_kernels.backends.reference import GradStats
from opt_kernels.backends.tables import DeviceTables, launching_on, to_device
from opt_kernels.backends.triton import jit, jit_once, launches, tl
from opt_kernels.backends.triton.formats import ALIGNMENT, BLOCK, NUM_WARPS, value_dtype
from opt_kernels.backends.triton.lanes import load, pointer

# Between these bounds, no float32 square that affects the sum has overflowed or underflowed.
SMALLEST_SAFE: tl.constexpr = tl.constexpr(1e-24)
LARGEST_SAFE: tl.constexpr = tl.constexpr(1e36)
CALLS = 1024  # cached calls; a step may have one per bucket, and calls that do not fit are rebuilt every step
NONFINITE: tl.constexpr = tl.constexpr(1 << 16)  # one non-finite element, in a word whose lower half counts zeros
SUM_BLOCK = 4096  # chunks that the last program adds at a time, with one memory latency


@jit
def is_finite(g: tl.tensor) -> tl.tensor:
    """Whether float32 g is neither infinite nor NaN. Tests the exponent, because compilers may fold `g == g`."""
    return (g.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@jit
def stats_tile(
    grad: tl.tensor, at: tl.tensor, n: tl.tensor,
    total: tl.tensor, counts: tl.tensor,
    MAXIMUM: tl.constexpr, FULL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Add the elements `at` to the running statistics of each lane.

    The counts of zeros (lower half) and of non-finite elements (upper half) share a word. A chunk has at most 2^14 of
    either, and saving registers lets more programs run at once.
    """
    g = load(grad, at, n, FULL).to(tl.float32)
    if MAXIMUM:
        total = tl.maximum(total, tl.where(g == g, tl.abs(g), float("inf")))
    else:
        total += g * g
    is_zero = g == 0.0
    if not FULL:
        is_zero = is_zero & (at < n)
    return total, counts + tl.where(is_zero, 1, tl.where(is_finite(g), 0, NONFINITE))


@jit
def exact_sum(grad: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The sum of squares of one chunk in float64, for a chunk whose float32 squares overflow or underflow (rare)."""
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, n, BLOCK):
        g = load(grad, start + tl.arange(0, BLOCK), n, False).to(tl.float64)
        total += g * g
    return tl.sum(total, axis=0)


# Each launch of a call writes its part of the results, which may begin at any address.
@jit_once(addresses=["sums", "counts"])
def stats_sweep(
    records: tl.tensor,  # (chunks, WIDTH) int64: gradient ... n, row, first
    sums: tl.tensor,  # (chunks,) float64, written
    counts: tl.tensor,  # (chunks, 2) int32, written: zeros, non-finite
    GRAD: tl.constexpr, MAXIMUM: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr,
) -> None:  # fmt: skip
    """Write the statistics of one chunk per program."""
    chunk = tl.program_id(0)
    record = records + chunk * WIDTH
    grad = pointer(tl.load(record), GRAD, E)
    n = tl.load(record + WIDTH - 3).to(tl.int32)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    both = tl.zeros((BLOCK,), dtype=tl.int32)
    if n == CHUNK:
        for start in range(0, CHUNK, BLOCK):
            total, both = stats_tile(grad, start + lanes, n, total, both, MAXIMUM, True)
    else:
        for start in range(0, n, BLOCK):
            total, both = stats_tile(grad, start + lanes, n, total, both, MAXIMUM, False)
    num_both = tl.sum(both, axis=0)
    num_zeros = num_both % NONFINITE
    result = (tl.max(total, axis=0) if MAXIMUM else tl.sum(total, axis=0)).to(tl.float64)
    if not MAXIMUM:
        lost = (result <= SMALLEST_SAFE) | (result >= LARGEST_SAFE) | (result != result)
        if lost & (num_zeros < n):
            result = exact_sum(grad, n, BLOCK)
    tl.store(sums + chunk, result)
    tl.store(counts + chunk * 2, num_zeros)
    tl.store(counts + chunk * 2 + 1, num_both // NONFINITE)


@jit_once(numbers=["num_chunks"])
def stats_total(
    sums: tl.tensor,  # (chunks,) float64
    counts: tl.tensor,  # (chunks, 2) int32
    power: tl.tensor,  # (1,) float64, written
    totals: tl.tensor,  # (2,) int64, written: non-finite, zeros
    num_chunks: tl.tensor,
    MAXIMUM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add the statistics of all chunks, in one program and therefore in a fixed order."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    zeros = tl.zeros((BLOCK,), dtype=tl.int64)
    nonfinite = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, num_chunks, BLOCK):
        at = start + lanes
        inside = at < num_chunks
        of_chunks = tl.load(sums + at, mask=inside, other=0.0)
        total = tl.maximum(total, of_chunks) if MAXIMUM else total + of_chunks
        zeros += tl.load(counts + at * 2, mask=inside, other=0).to(tl.int64)
        nonfinite += tl.load(counts + at * 2 + 1, mask=inside, other=0).to(tl.int64)
    tl.store(power, tl.max(total, axis=0) if MAXIMUM else tl.sum(total, axis=0))
    tl.store(totals, tl.sum(nonfinite, axis=0))
    tl.store(totals + 1, tl.sum(zeros, axis=0))


def grad_stats(grads: Sequence[Tensor], *, count_zeros: bool = True, norm_type: float = 2.0) -> GradStats:
    """Same as `reference.grad_stats`, with a relative error of the sum of squares of 1e-6; does not synchronize.

    The kernel supports norm_type 2 and infinity; for infinity, a NaN results in infinity. The reference computes any
    other norm, on the device too. Zeros are always counted, at no cost; without `count_zeros` 0 is returned.
    """
    reference.check_norm_type(norm_type)
    with launching_on(grads[0].device if grads else torch.device("cpu")):
        tables = _tables(grads) if norm_type in (2.0, math.inf) else []
        if tables is None:
            grads = [grad.detach().contiguous() for grad in grads]  # these live until the sweep is launched
            tables = _tables(grads)
        if not tables:
            return reference.grad_stats(grads, count_zeros=count_zeros, norm_type=norm_type)
        device = grads[0].device
        num_chunks = sum([len(records) for records, _ in tables])
        sums = torch.empty(num_chunks, dtype=torch.float64, device=device)
        counts = torch.empty(num_chunks, 2, dtype=torch.int32, device=device)
        maximum = math.isinf(norm_type)
        start = 0
        for records, options in tables:
            into = (sums[start:], counts[start:]) if start else (sums, counts)
            stats_sweep[(records.shape[0],)](records, *into, MAXIMUM=maximum, **options)
            start += records.shape[0]
        power = torch.empty((), dtype=torch.float64, device=device)
        totals = torch.empty(2, dtype=torch.int64, device=device)
        options = {"MAXIMUM": maximum, "BLOCK": SUM_BLOCK, "num_warps": 8, "enable_fp_fusion": True}
        stats_total[(1,)](sums, counts, power, totals, num_chunks, **options)
        return GradStats(power, totals[0], totals[1] if count_zeros else torch.zeros_like(totals[1]))


_Table = tuple[Tensor, dict[str, Any]]  # records, and options of the sweep


def _tables(grads: Sequence[Tensor]) -> list[_Table] | None:
    """A chunk table per dtype and alignment. None if a gradient is not contiguous."""
    if not grads:
        return []
    return known_tables(grads[0].device).get(tuple(map(Tensor.data_ptr, grads)), lambda: _built(grads), of=grads)


def _built(grads: Sequence[Tensor]) -> list[_Table] | None:
    if not all(map(Tensor.is_contiguous, grads)):
        return None
    by_format: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    for grad in grads:
        if grad.numel():
            by_format.setdefault((grad.dtype, grad.data_ptr() % ALIGNMENT == 0), []).append(grad)
    return [_table(dtype, aligned, group) for (dtype, aligned), group in by_format.items()]


def _table(dtype: torch.dtype, aligned: bool, grads: Sequence[Tensor]) -> _Table:
    device = grads[0].device
    item_bytes = dtype.itemsize
    numels = [grad.numel() for grad in grads]
    chunk = launches.chunk_elements(sum(numels), device)
    chunks = launches.cut(numels, chunk)
    addresses = chunks.at([grad.data_ptr() for grad in grads], item_bytes=item_bytes)
    unused = [0] * len(grads)
    records = to_device(launches.chunk_records(chunks, [addresses], rows=unused, firsts=unused), device)
    options = {
        "GRAD": value_dtype(dtype),
        "WIDTH": records.shape[1],
        "CHUNK": chunk,
        "BLOCK": tile_elements(dtype),
        # With one column, no common width is needed. Programs read twice as many elements in 16 bits at a time, so
        # that enough bytes are in flight.
        "E": ALIGNMENT // item_bytes if aligned else 1,
        "num_warps": NUM_WARPS,
        "enable_fp_fusion": True,
    }
    return records, options


@cache
def known_tables(device: torch.device) -> DeviceTables[list[_Table] | None]:
    """The cache of gradient tables on `device`, shared by the whole process: a table depends only on its key.

    Its memory is limited, because gradients that move add a table in every step.
    """
    return DeviceTables(
        device, capacity=CALLS, bytes_of=lambda tables: sum(records.nbytes for records, _ in tables or ())
    )


def tile_elements(dtype: torch.dtype) -> int:
    """Elements that a program reads at a time."""
    return BLOCK * 4 // dtype.itemsize
