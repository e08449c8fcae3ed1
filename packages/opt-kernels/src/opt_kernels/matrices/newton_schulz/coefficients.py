"""The coefficient sets of the Newton-Schulz iteration, and the schedule of steps for each set."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from opt_kernels.choice import NamedChoice


class Coefficients(NamedTuple):
    """One step: X <- aX + b(XXᵀ)X + c(XXᵀ)²X; for a singular value, s <- a s + b s³ + c s⁵."""

    a: float
    b: float
    c: float


Schedule: TypeAlias = tuple[Coefficients, ...]


class CoefficientType(NamedChoice):
    """The sets by name. Brackets: the range to which five steps map the singular values in [0.01, 1]."""

    SIMPLE = "simple"  # [0.682, 1.134] Keller Jordan's Muon: the steepest start, does not converge
    QUINTIC = "quintic"  # [0.978, 1.032] five different steps, Megatron-Core's default
    POLAR_EXPRESS = "polar_express"  # [0.870, 1.124] arXiv 2505.16932: minimax steps, damped by 1.01 per degree
    CANS = "cans"  # [0.884, 1.120] arXiv 2506.10935: Chebyshev steps
    DEEPSEEKV4 = "deepseekv4"  # [1.000, 1.001] after its ten steps: eight simple ones, then two that converge
    CUBIC5 = "cubic5"  # [0.774, 1.300] no fifth power: two matrix products a step in place of three
    AOL = "aol"  # [0.987, 1.082] four steps, of [0.02, 0.8]: of rows rescaled by `reference.row_scales`
    CUSTOM = "custom"  # the caller's own, repeated in a cycle


def _steps(*rows: tuple[float, float, float]) -> Schedule:
    return tuple(Coefficients(*row) for row in rows)


_SIMPLE = _steps((3.4445, -4.7750, 2.0315))
_QUINTIC = _steps(
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_POLAR_EXPRESS = _steps(
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
)
_CANS = _steps(
    (8.4703, -25.1081, 18.6293),
    (4.1828, -3.1087, 0.5806),
    (3.9619, -2.9541, 0.5630),
    (3.2866, -2.4647, 0.5074),
    (2.2737, -1.6447, 0.4162),
)
_CUBIC5 = _steps(
    (3.3656576, -3.3420992, 0.0),
    (2.5744352, -1.4957376, 0.0),
    (2.5368962, -1.4312570, 0.0),
    (2.4418906, -1.2764040, 0.0),
    (2.2230472, -0.9630650, 0.0),
)
_AOL = _steps(
    (4.0098, -7.0585, 2.4635),
    (3.4585, -5.5479, 2.5959),
    (2.7573, -3.2939, 1.4254),
    (2.7215, -3.0494, 1.3169),
)


_SETS: Mapping[CoefficientType, Schedule] = {
    CoefficientType.SIMPLE: _SIMPLE,
    CoefficientType.QUINTIC: _QUINTIC,
    CoefficientType.POLAR_EXPRESS: _POLAR_EXPRESS,
    CoefficientType.CANS: _CANS,
    CoefficientType.DEEPSEEKV4: _SIMPLE * 8 + _steps((2.0, -1.5, 0.5)) * 2,
    CoefficientType.CUBIC5: _CUBIC5,
    CoefficientType.AOL: _AOL,
}
# Sets that are continued from their first step if more steps are requested than they have, and that have one length.
# Others are continued with their last step: aol, repeated from its first step, would map 1 to -0.6.
_CYCLES = (CoefficientType.SIMPLE, CoefficientType.QUINTIC, CoefficientType.CUSTOM)
_OF_ONE_LENGTH = (CoefficientType.CUBIC5,)


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
    if kind not in _CYCLES:
        steps += steps[-1:] * (num_steps - len(steps))
    return tuple(steps[i % len(steps)] for i in range(num_steps))
