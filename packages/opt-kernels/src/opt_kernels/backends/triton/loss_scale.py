"""The change of a dynamic loss scale after a step, in one small kernel.

All arithmetic is float64, in the order of the same torch operations, with the same bits.
"""

import torch
from torch import Tensor

from opt_kernels import devices
from opt_kernels.backends.triton.jit import jit, tl


@jit
def rescale(
    before: tl.tensor,  # (4,) float64: scale, clean steps, overflows until it backs off, 1 / scale
    after: tl.tensor,  # (4,) float64, written; not `before`
    overflow: tl.tensor,  # () bool
    unless: tl.tensor,  # () bool, or None: then False
    GROWTH: tl.constexpr,
    BACKOFF: tl.constexpr,
    MINIMUM: tl.constexpr,
    WINDOW: tl.constexpr,  # clean steps after which the scale grows
    HYSTERESIS: tl.constexpr,
) -> None:
    """Write the next state, in one program."""
    scale = tl.load(before)
    clean = tl.load(before + 1)
    forgiven = tl.load(before + 2)
    overflows = tl.load(overflow) != 0
    one = tl.full((), 1.0, tl.float64)
    none = tl.full((), 0.0, tl.float64)
    grows = clean + one >= tl.full((), WINDOW, tl.float64)
    backed_off = tl.maximum(scale * tl.full((), BACKOFF, tl.float64), tl.full((), MINIMUM, tl.float64))
    grown = tl.where(grows, scale * tl.full((), GROWTH, tl.float64), scale)
    next_scale = tl.where(overflows, tl.where(forgiven <= one, backed_off, scale), grown)
    next_clean = tl.where(overflows | grows, none, clean + one)
    restored = tl.where(grows, tl.full((), HYSTERESIS, tl.float64), forgiven)
    next_forgiven = tl.where(overflows, forgiven - one, restored)
    if unless is not None:
        stays = tl.load(unless) != 0
        next_scale = tl.where(stays, scale, next_scale)
        next_clean = tl.where(stays, clean, next_clean)
        next_forgiven = tl.where(stays, forgiven, next_forgiven)
    tl.store(after, next_scale)
    tl.store(after + 1, next_clean)
    tl.store(after + 2, next_forgiven)
    tl.store(after + 3, one / next_scale)


def rescaled(
    before: Tensor,  # (4,) float64, see `rescale`
    overflow: Tensor,  # 0-d bool
    *,
    unless: Tensor | None,  # 0-d bool: nothing changes if it is set
    growth: float,
    backoff: float,
    minimum: float,
    window: int,
    hysteresis: int,
) -> Tensor:
    """The state of a dynamic loss scale after a step, in new memory."""
    after = torch.empty_like(before)
    with devices.launching_on(before.device):
        rescale[(1,)](
            before, after, overflow, unless, GROWTH=float(growth), BACKOFF=float(backoff), MINIMUM=float(minimum),
            WINDOW=float(window), HYSTERESIS=float(hysteresis), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return after
