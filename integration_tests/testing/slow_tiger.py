"""SlowTiger, made up for the tests: three states, one of which begins at the weights, and a branch on the step.

m <- b m + (1 - b) (g + wd p)        k <- max(0.999 k, |m|)        p <- p - lr min(1, t / warm) sign(m) sqrt(|m| / k)
every `period` steps: s <- s + pull (p - s), p <- s;  s is p before the first step
"""

from typing import Any

from opt_kernels.formulas import (
    Choice,
    Formula,
    Number,
    State,
    absolute,
    floor,
    fma,
    maximum,
    minimum,
    sign,
    sqrt,
    where,
)


def scalars(
    *, lr: float, weight_decay: float, momentum: float, period: float, pull: float, warm: float, step: float
) -> dict[str, float]:
    cycles = step / period
    return {
        "rate": lr * minimum(1.0, step / warm) ** 0.5,
        "wd": weight_decay,
        "weight": 1 - momentum,
        "pull": pull,
        "is_first": where(step == 1, 1.0, 0.0),
        "is_sync": where(cycles == floor(cycles), 1.0, 0.0),
    }


def update(
    p: Any,
    g: Any,
    momentum_buffer: Any,
    slow: Any,
    peak: Any,
    *,
    rate: Any,
    wd: Any,
    weight: Any,
    pull: Any,
    is_first: Any,
    is_sync: Any,
    ahead: bool,
) -> Any:
    if is_first != 0:
        slow = p
    if wd != 0:
        g = fma(wd, p, g)
    momentum_buffer = fma(weight, g - momentum_buffer, momentum_buffer)
    u = fma(weight, g - momentum_buffer, momentum_buffer) if ahead else momentum_buffer
    peak = maximum(peak * 0.999, absolute(u))
    p = p - rate * sign(u) * sqrt(absolute(u) / (peak + 1e-8))
    if is_sync != 0:
        slow = fma(pull, p - slow, slow)
        p = slow
    return p, momentum_buffer, slow, peak


RULE = Formula(
    name="slow_tiger",
    title="SlowTiger",
    scalars=scalars,
    update=update,
    states=(State("momentum_buffer"), State("slow"), State("peak", signed=False)),
    numbers=(
        Number("lr", 1e-3),
        Number("momentum", 0.9, low=0.0, below=1.0),
        Number("period", 3, low=1),
        Number("pull", 0.5, low=0.0),
        Number("warm", 2, low=1),
    ),
    choices=(Choice("ahead", True),),
)
