"""The scalar arithmetic between the statistics of a step and its update, in two small kernels.

    chunks ── total_ ──▶ row of sums ── all-reduce by the caller ──▶ decide_ ──▶ skip flag, clipped scales

A row of sums is (n,) float64: the sum of squares of each norm slot, then non-finite elements, zeros, ranks that refuse
the step, ranks with a parameter that has moved, and three sums (count, total, squares) for each compared group of
hyper-parameters. All arithmetic is float64, in the order of the same torch operations, with the same bits.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels import devices
from opt_kernels.backends.triton.grad_stats import SUM_BLOCK, StatsSweep, stats_of_chunks
from opt_kernels.backends.triton.jit import jit, tl
from opt_kernels.backends.triton.loss_scale import rescaled
from opt_kernels.backends.verdict import VerdictKernels


@jit
def total(
    sums: tl.tensor,  # (chunks,) float64
    counts: tl.tensor,  # (chunks, 2) int32
    known: tl.tensor,  # (size - slots - 2,) float64: the numbers of the host
    row: tl.tensor,  # (size,) float64, written
    num_chunks: tl.tensor,
    size: tl.tensor,
    SLOT: tl.constexpr,  # of the squares; -1: these gradients count in no norm
    SLOTS: tl.constexpr,
    SCALE: tl.constexpr,  # of the squares
    ZEROS: tl.constexpr,  # whether to count zeros
    FIRST: tl.constexpr,  # whether the row has no sums yet
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,  # a power of two, at least `size`
) -> None:
    """Add the statistics of some gradients to the row, in one program and therefore in a fixed order."""
    squares, num_nonfinite, num_zeros = stats_of_chunks(sums, counts, num_chunks, False, BLOCK)
    at = tl.arange(0, LANES)
    nothing = tl.zeros((LANES,), dtype=tl.float64)
    if FIRST:
        is_known = (at >= SLOTS + 2) & (at < size)
        before = tl.load(known + at - (SLOTS + 2), mask=is_known, other=0.0)
    else:
        before = tl.load(row + at, mask=at < size, other=0.0)
    added = tl.where(at == SLOTS, num_nonfinite.to(tl.float64), nothing)
    if ZEROS:
        added = tl.where(at == SLOTS + 1, num_zeros.to(tl.float64), added)
    if SLOT >= 0:
        added = tl.where(at == SLOT, squares * tl.full((), SCALE, tl.float64), added)
    tl.store(row + at, before + added, mask=at < size)


@jit
def decide(
    row: tl.tensor,  # (slots + 4 + 3 * groups,) float64: sums over ranks
    inv_scale: tl.tensor,  # () float64, or None: then INV_SCALE
    norms: tl.tensor,  # (slots,) float64, written
    scales: tl.tensor,  # (slots,) float64, written
    flags: tl.tensor,  # (4,) bool, written: overflow, has_error, skip, proceeds
    INV_SCALE: tl.constexpr,
    MAX_NORM: tl.constexpr,  # 0: nothing is clipped
    SKIP_ABOVE: tl.constexpr,  # None: no norm is too large
    CLIPS: tl.constexpr,  # bits: the slots that are clipped
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOT_LANES: tl.constexpr,  # powers of two, at least SLOTS and GROUPS
    GROUP_LANES: tl.constexpr,
) -> None:
    """Write the decisions on a step, in one program."""
    at = tl.arange(0, SLOT_LANES)
    norm = tl.sqrt(tl.load(row + at, mask=at < SLOTS, other=0.0))  # NaN if a sum is negative or NaN
    norm = tl.where(tl.load(row + SLOTS) > 0, norm + float("inf"), norm)
    overflows = tl.min((norm < float("inf")).to(tl.int32), axis=0) == 0  # a NaN is not below
    has_error = (tl.load(row + SLOTS + 2) + tl.load(row + SLOTS + 3)) > 0
    if GROUPS > 0:
        group = tl.arange(0, GROUP_LANES)
        sums = row + SLOTS + 4 + 3 * group
        count = tl.load(sums, mask=group < GROUPS, other=0.0).to(tl.int64)
        of_values = tl.load(sums + 1, mask=group < GROUPS, other=0.0).to(tl.int64)
        squares = tl.load(sums + 2, mask=group < GROUPS, other=0.0).to(tl.int64)
        differs = (count * squares != of_values * of_values).to(tl.int32)
        has_error = has_error | (tl.max(differs, axis=0) > 0)
    if inv_scale is not None:  # noqa: SIM108  # Triton compiles only one branch of a statement
        inverse = tl.load(inv_scale)
    else:
        inverse = tl.full((), INV_SCALE, tl.float64)
    norm = norm * inverse
    skips = overflows | has_error
    if SKIP_ABOVE is not None:
        first = tl.sum(tl.where(at == 0, norm, 0.0), axis=0)
        skips = skips | (first > tl.full((), SKIP_ABOVE, tl.float64))
    one = tl.full((SLOT_LANES,), 1.0, tl.float64)
    if MAX_NORM > 0:
        clipped = tl.full((), MAX_NORM, tl.float64) / (norm + tl.full((), 1e-6, tl.float64))
        clipped = tl.where(clipped > 1.0, one, clipped)
        is_clipped = ((tl.full((), CLIPS, tl.int64) >> at.to(tl.int64)) & 1) == 1
        one = tl.where(is_clipped, clipped, one)
    tl.store(norms + at, norm, mask=at < SLOTS)
    tl.store(scales + at, one * inverse, mask=at < SLOTS)
    tl.store(flags, overflows)
    tl.store(flags + 1, has_error)
    tl.store(flags + 2, skips)
    tl.store(flags + 3, skips == 0)


class Summand(NamedTuple):
    """Gradients whose statistics are added to the same sums."""

    sweep: StatsSweep
    slot: int | None  # None: only non-finite elements are counted
    scale: float  # of the squares


class RowOfSums:
    """The statistics of fixed gradients and the numbers of the host, in the same memory at every step."""

    def __init__(self, summands: Sequence[Summand], *, num_slots: int, num_known: int, device: torch.device):
        size = num_slots + 2 + num_known
        self._size = size
        self._row = torch.zeros(size, dtype=torch.float64, device=device)
        common = {"SLOTS": num_slots, "BLOCK": SUM_BLOCK, "LANES": _lanes(size), "num_warps": 8}
        self._totals = [
            (
                sweep,
                slot is not None,
                {"SLOT": -1 if slot is None else slot, "SCALE": scale, "FIRST": number == 0, **common},
            )
            for number, (sweep, slot, scale) in enumerate(summands)
        ]

    def write_(self, known: Tensor, *, count_zeros: bool) -> Tensor:
        """Sweep the gradients. Returns the row; `known` (num_known,) float64 are its last numbers."""
        row = self._row
        with devices.launching_on(row.device):
            for sweep, is_counted, options in self._totals:
                sums, counts = sweep.launch()
                total[(1,)](
                    sums, counts, known, row, sweep.num_chunks, self._size,
                    ZEROS=count_zeros and is_counted, enable_fp_fusion=False, **options,
                )  # fmt: skip
        return row


class Decisions:
    """The decisions on a step, in the same memory at every step."""

    def __init__(
        self,
        *,
        num_slots: int,
        num_groups: int,  # whose hyper-parameters are compared
        max_norm: float,  # 0: nothing is clipped
        clips: Sequence[bool],  # for each slot
        skip_above: float,  # infinity: no norm is too large
        device: torch.device,
    ):
        self._numbers = torch.empty(2, num_slots, dtype=torch.float64, device=device)
        self._flags = torch.empty(4, dtype=torch.bool, device=device)
        self.norms: Tensor = self._numbers[0]
        self.scales: Sequence[Tensor] = self._numbers[1].unbind()
        self.overflow, self.has_error, self.skip, self.proceeds = self._flags.unbind()
        self._options = {
            "MAX_NORM": float(max_norm),
            "SKIP_ABOVE": float(skip_above) if skip_above < math.inf else None,
            "CLIPS": sum(1 << slot for slot, is_clipped in enumerate(clips) if is_clipped),
            "SLOTS": num_slots,
            "GROUPS": num_groups,
            "SLOT_LANES": _lanes(num_slots),
            "GROUP_LANES": _lanes(num_groups),
            # A product fused with a sum would change the bits.
            "enable_fp_fusion": False,
        }

    def write_(self, row: Tensor, inv_scale: float | Tensor) -> None:
        """Decide on sums over all ranks."""
        on_device = inv_scale if isinstance(inv_scale, Tensor) else None
        known = 1.0 if isinstance(inv_scale, Tensor) else inv_scale
        with devices.launching_on(row.device):
            decide[(1,)](
                row, on_device, self.norms, self._numbers[1], self._flags, INV_SCALE=known, **self._options
            )  # fmt: skip


def _lanes(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


KERNELS = VerdictKernels(StatsSweep.of, Summand, RowOfSums, Decisions, rescaled)
