"""The coefficient sets of Newton-Schulz: their schedules, and where their steps map singular values.

Rounding to 16 bits can carry singular values out of the range in which the steps of a set converge. `range_of` bounds
that, and `narrow_steps` damps the steps where it would happen.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import torch

from opt_kernels.works import NamedChoice


class Coefficients(NamedTuple):
    """One step: X <- aX + b(XXᵀ)X + c(XXᵀ)²X; for a singular value, s <- a s + b s³ + c s⁵."""

    a: float
    b: float
    c: float


Schedule: TypeAlias = tuple[Coefficients, ...]


class CoefficientType(NamedChoice):
    """The sets by name. Brackets: the range to which five steps map the singular values in [0.01, 1] of the norm.

    Smaller singular values stay below its upper end, or below the number after `<`. In 16 bits, rounding moves both
    ends by at most 12 units of 2⁻⁸ in bf16 and 32 units of 2⁻¹¹ in fp16, also for matrices of rank one. A set whose
    steps diverge after that is refused in 16 bits: cans, and custom ones like it.
    """

    SIMPLE = "simple"  # [0.682, 1.134] < 1.203 Keller Jordan's Muon: the steepest start, does not converge
    QUINTIC = "quintic"  # [0.978, 1.032] < 1.146 five different steps, Megatron-Core's default
    POLAR_EXPRESS = "polar_express"  # [0.870, 1.124] arXiv 2505.16932: minimax steps, damped by 1.01 per degree
    CANS = "cans"  # [0.884, 1.120] arXiv 2506.10935: Chebyshev steps; for fp32 products
    DEEPSEEKV4 = "deepseekv4"  # [1.000, 1.001] < 1.003 its ten steps: eight simple ones, then two that converge
    CUBIC5 = "cubic5"  # [0.774, 1.300] no fifth power: two matrix products a step in place of three
    AOL = "aol"  # [0.987, 1.082] < 1.085 four steps, of [0.02, 0.8]: of rows rescaled by `row_scales`
    CUSTOM = "custom"  # the caller's own, repeated in a cycle


def _steps(*rows: tuple[float, float, float]) -> Schedule:
    return tuple(Coefficients(*row) for row in rows)


_SIMPLE = _steps((3.4445, -4.7750, 2.0315))
_SETS: Mapping[CoefficientType, Schedule] = {
    CoefficientType.SIMPLE: _SIMPLE,
    CoefficientType.QUINTIC: _steps(
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    CoefficientType.POLAR_EXPRESS: _steps(
        (8.2051, -22.9019, 16.4607), (4.0664, -2.8612, 0.5184), (3.9096, -2.8234, 0.5250), (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985), (1.8726, -1.2307, 0.3585), (1.8564, -1.2132, 0.3568), (1.8750, -1.2500, 0.3750),
    ),
    CoefficientType.CANS: _steps(
        (8.4703, -25.1081, 18.6293), (4.1828, -3.1087, 0.5806), (3.9619, -2.9541, 0.5630), (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    CoefficientType.DEEPSEEKV4: _SIMPLE * 8 + _steps((2.0, -1.5, 0.5)) * 2,
    CoefficientType.CUBIC5: _steps(
        (3.3656576, -3.3420992, 0.0), (2.5744352, -1.4957376, 0.0), (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0), (2.2230472, -0.9630650, 0.0),
    ),
    CoefficientType.AOL: _steps(
        (4.0098, -7.0585, 2.4635), (3.4585, -5.5479, 2.5959), (2.7573, -3.2939, 1.4254), (2.7215, -3.0494, 1.3169),
    ),
}  # fmt: skip
# Sets that are continued from their first step if more steps are requested than they have, and that have one length.
# Others are continued with their last step: aol, repeated from its first step, would map 1 to -0.6.
_CYCLES = (CoefficientType.SIMPLE, CoefficientType.QUINTIC, CoefficientType.CUSTOM)
_OF_ONE_LENGTH = (CoefficientType.CUBIC5,)
# Sets that 16-bit rounding carries away: each polynomial reaches the end of the next one's domain at several values,
# and that one falls steeply before the end and diverges after it. With five steps in bf16, no damping keeps values
# above 0.77; more steps would, but lose them in segments.
NOT_IN_16_BITS = (CoefficientType.CANS,)


def schedule(kind: CoefficientType, *, num_steps: int, custom: Sequence[tuple[float, float, float]] = ()) -> Schedule:
    """The coefficients of each of `num_steps` steps.

    Raises ValueError if `num_steps` is below 1 or differs from the length of a set with a fixed length, and unless
    `custom` is given exactly for `CUSTOM`.
    """
    if num_steps < 1:
        raise ValueError(f"num_ns_steps is {num_steps}, but at least 1 step is needed; 5 is usual")
    if custom and kind is not CoefficientType.CUSTOM:
        raise ValueError(f"custom_coefficients are given, but coefficient_type is '{kind}'; set it to 'custom'")
    if not custom and kind is CoefficientType.CUSTOM:
        raise ValueError("coefficient_type 'custom' needs custom_coefficients, a sequence of (a, b, c)")
    steps = _steps(*custom) if custom else _SETS[kind]
    if kind in _OF_ONE_LENGTH and num_steps != len(steps):
        raise ValueError(f"num_ns_steps is {num_steps}, but coefficient_type '{kind}' has exactly {len(steps)} steps")
    further = steps if kind in _CYCLES else steps[-1:]
    return (steps + further * num_steps)[:num_steps]


class Range(NamedTuple):
    """Where steps map singular values."""

    low: float  # of those of at least 0.01
    high: float  # of all


SMALLEST = 0.01
GRID = 2001
CONVERGED = 0.65  # lower end of the range of steps that converge; other ranges depend on each rounding
DAMPING = 1.01  # per degree, as in Polar Express: it leaves room for values that rounding lifts above the range
DRIFT = 0.05  # of a range, if each step is off by two units of bf16


def range_of(steps: Schedule, *, unit: float = 0.0) -> Range:
    """The range of singular values in [0, 1] after the steps, if each step adds an error of up to `unit` times its
    result, in the worst direction."""
    even = torch.linspace(0.0, 1.0, GRID, dtype=torch.float64, device="cpu")
    small = torch.logspace(-6.0, 0.0, GRID, dtype=torch.float64, device="cpu")  # steep steps lift these far
    start = torch.cat([even, small])
    lower = start * (1 - unit)
    upper = start * (1 + unit)
    parts = torch.linspace(0.0, 1.0, 5, dtype=torch.float64, device="cpu").unsqueeze(-1)
    for a, b, c in steps:
        x = lower + parts * (upper - lower)
        squares = x * x
        values = x * (a + squares * (b + squares * c))
        lower = values.amin(0)
        upper = values.amax(0)
        error = unit * torch.maximum(lower.abs(), upper.abs())
        lower = lower - error
        upper = upper + error
    return Range(float(lower[start >= SMALLEST].min()), float(upper.max()))


@cache
def narrow_steps(steps: Schedule) -> Schedule | None:
    """The steps for 16-bit products: `steps`, or damped ones where rounding would carry values out of their range.

    None if damping does not suffice. cubic5 is damped, as it maps 1 to nearly 0.
    """
    low, high = range_of(steps)
    *others, last = steps
    damped = []
    for a, b, c in others:
        damped.append(Coefficients(a / DAMPING, b / DAMPING**3, c / DAMPING**5))
    unit = torch.finfo(torch.bfloat16).eps
    for candidate in (steps, (*damped, last)):
        rounded = range_of(candidate, unit=unit)
        is_kept = low < CONVERGED or rounded.low >= (1 - DRIFT) * low
        if is_kept and rounded.high <= (1 + DRIFT) * high:
            return candidate
    return None


@cache
def largest_eigenvalue(steps: Schedule) -> float:
    """The largest eigenvalue of the Gram matrix after these steps of any matrix of norm 1."""
    return max(1.0, range_of(steps).high ** 2)
