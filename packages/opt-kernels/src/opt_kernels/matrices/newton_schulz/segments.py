"""Cuts a Newton-Schulz schedule into segments that iterate on the small Gram matrix of a long matrix.

The steps of a segment are computed from the Gram matrix R = XXᵀ and multiply only (m, m) matrices. X (m, n) is read
twice per segment: to form R, and to apply the product of the steps. The longer X is, the more this saves. But R has the
squares of the singular values: rounding leaves its small eigenvalues with an error of one unit, possibly negative, and
every step multiplies the error by a². If it nears 1, the iteration diverges. The segment must end before that; then X
is updated and R is recomputed. (Gram-Newton-Schulz, Dao-AILab 2026, restarts at fixed steps in fp16; here the cuts
depend on the schedule and the dtype.)
"""

from math import prod
from typing import NamedTuple

import torch

from opt_kernels.matrices.newton_schulz.coefficients import Schedule

# An eigenvalue of R that consists of rounding errors may grow to about this before the polynomials stop contracting it.
# In bf16, two steps of the quintic set reach 1.02 and are about as accurate as one step at a time. Three steps are less
# accurate, and so are two steps of the cans set, which reach 1.07.
GROWTH_LIMIT = 1.05
# Also below the limit, each step of a segment multiplies the error of R's small eigenvalues. With these lengths the
# error is at most five times that of one step at a time, for every set, and on Gaussian matrices about twice at most.
LONGEST_NARROW, LONGEST = 3, 2
HALVED = 0.625  # the work of a symmetric product of which only blocks up to the diagonal are computed


class _Cut(NamedTuple):
    cost: float
    segments: tuple[Schedule, ...]


def cut(schedule: Schedule, *, rows: int, cols: int, dtype: torch.dtype, symmetric: bool) -> tuple[Schedule, ...]:
    """The cheapest division of `schedule` into segments that are accurate enough in `dtype`.

    `rows` is the side whose Gram matrix is formed. `symmetric`: whether symmetric products cost less than others.
    Segments of one step each are the plain iteration, which is always allowed, and cheapest for a square matrix.
    """
    unit = torch.finfo(dtype).eps / 2
    longest = LONGEST_NARROW if dtype.itemsize == 2 else LONGEST
    best = [_Cut(0.0, ())]  # best[i]: of the first i steps
    for end in range(1, len(schedule) + 1):
        candidates = []
        for start in range(end - 1, max(end - longest, 0) - 1, -1):
            segment = schedule[start:end]
            if len(segment) > 1 and growth(segment) * unit > GROWTH_LIMIT:
                break
            cost = best[start].cost + _cost(segment, ratio=cols / max(rows, 1), symmetric=symmetric)
            candidates.append(_Cut(cost, (*best[start].segments, segment)))
        best.append(min(candidates, key=lambda candidate: candidate.cost))
    return best[-1].segments


def growth(segment: Schedule) -> float:
    """The factor by which the steps multiply the smallest eigenvalues of the Gram matrix."""
    return prod(a * a for a, _, _ in segment)


def _cost(segment: Schedule, *, ratio: float, symmetric: bool) -> float:
    """The multiplications of a segment, in units of m³, for a matrix of m rows and ratio · m columns."""
    # Products of (m, m): R² where needed, one for the factor after the first step, two for R before the last.
    small_products = sum(step.c != 0.0 for step in segment) + 3 * (len(segment) - 1)
    half = HALVED if symmetric else 1.0
    return half * ratio + half * small_products + ratio
