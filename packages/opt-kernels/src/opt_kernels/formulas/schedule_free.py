"""Schedule-Free AdamW (Defazio et al. 2024, arXiv 2405.15682, algorithm 1), without a schedule of the learning rate.

With y the parameter during training, g its scaled gradient, t the step (from 1), and k = warmup_steps:

    s = lr * min(1, t / k)        c = w(t) / (w(1) + ... + w(t)),  w(i) = min(1, i / k)^2
    v <- b2 * v + (1 - b2) * g^2        u = g / (sqrt(v / (1 - b2^t)) + eps) + wd * y
    y <- y + c * (z - y) - s * (1 - b1 * (1 - c)) * u
    z <- z - s * u                      z is y before the first step

The weights for evaluation are the average x = y + (1 - 1/b1) * (z - y); y = x + (1 - b1) * (z - x). In the
code, exp_avg_sq is v, share is c and step_z is s. The weights w(i) are the paper's for an lr that does not rise: warm
up with warmup_steps, and do not schedule lr. `RisingRates` warns of an lr that rises.
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from opt_kernels.formulas.formula import Formula, State
from opt_kernels.formulas.functions import fma, maximum, minimum, power, sqrt, where
from opt_kernels.works import Number, is_on_device


def scalars(*, lr, weight_decay, beta1, beta2, eps, warmup_steps, step):
    k = maximum(warmup_steps, 1.0)
    early = minimum(step, k)
    warmth = early / k
    # w(1) + ... + w(t): (1^2 + ... + early^2) / k^2 during the warmup, and 1 for each step after it.
    sum_of_weights = early * (early + 1) * (2 * early + 1) / (6 * k * k) + maximum(step - k, 0.0)
    share = warmth * warmth / sum_of_weights
    return {
        "is_first": where(step == 1, 1.0, 0.0),
        "weight_decay": weight_decay,
        "beta2": beta2,
        "weight2": 1 - beta2,
        "root2": sqrt(1 - power(beta2, step)),
        "share": share,
        "step_y": lr * warmth * (1 - beta1 * (1 - share)),
        "step_z": lr * warmth,
        "eps": eps,
    }


def update(p, g, z, exp_avg_sq, *, is_first, weight_decay, beta2, weight2, root2, share, step_y, step_z, eps):
    z = where(is_first != 0, p, z)
    exp_avg_sq = fma(weight2 * g, g, exp_avg_sq * beta2)
    u = g / (sqrt(exp_avg_sq) / root2 + eps)
    if weight_decay != 0:
        u = fma(weight_decay, p, u)
    return fma(share, z - p, p) - step_y * u, z - step_z * u, exp_avg_sq


def averaged(p, z, *, beta1):
    return p + (1 - 1 / beta1) * (z - p)


def trained(p, z, *, beta1):
    return p + (1 - beta1) * (z - p)


NUMBERS = (
    Number("lr", 2.5e-3),
    Number("betas", (0.9, 0.999), low=0.01, below=1.0),
    Number("eps", 1e-8),
    Number("weight_decay", 0.0),
    Number("warmup_steps", 0, low=0),
)

SCHEDULE_FREE = Formula(
    name="schedule_free",
    title="AdamWScheduleFree",
    states=(State("z"), State("exp_avg_sq", signed=False, beta="beta2")),
    numbers=NUMBERS,
    scalars=scalars,
    update=update,
    evaluation=(averaged, trained),
)


class RisingRates:
    """Warns once if the learning rate of a group rises above its largest earlier one.

    The paper weighs an iterate by the square of the largest rate so far. With a warmup by a schedule instead
    of warmup_steps, the weights w(i) would let the first iterates count as much as all others.
    """

    def __init__(self) -> None:
        self._largest: dict[int, float] = {}  # by number of the group
        self._has_warned = False

    def note(self, groups: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
        """Note the rates of the numbered groups in this step. Rates on a device are not read."""
        for number, group in groups:
            lr = group["lr"]
            if self._has_warned:
                return
            if is_on_device(lr):
                continue
            rate = float(lr)
            largest = self._largest.setdefault(number, rate)
            if rate > largest:
                self._has_warned = True
                warnings.warn(
                    f"the lr of group {number} rose from {largest:g} to {rate:g}: the average of schedule_free weighs "
                    "its steps for an lr that does not rise, so the averaged weights will not be those of the "
                    "algorithm; set warmup_steps in place of a schedule, and keep lr constant",
                    stacklevel=5,
                )
