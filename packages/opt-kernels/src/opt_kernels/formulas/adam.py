"""Adam and AdamW (Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2).

With g the scaled gradient, t the step (from 1), and m, v the moments:

    g <- g + wd * p            only where weight decay is not decoupled
    p <- p - lr * wd * p       only where it is
    m <- m + (1 - b1) * (g - m)
    v <- b2 * v + (1 - b2) * g^2

    order "torch":  p <- p - (lr / (1 - b1^t)) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
    order "te":     p <- p - lr * ((m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + wd * p)

The two orders agree except for rounding: the first has the operations of torch.optim.AdamW(fused=True) in their order,
the second is Transformer Engine's, which decays within the update.
"""

from typing import Any

from opt_kernels.formulas.formula import Formula, State
from opt_kernels.formulas.functions import fma, power, sqrt


def scalars(*, lr: float, weight_decay: float, beta1: float, beta2: float, eps: float, step: float) -> dict[str, float]:
    correction1 = 1 - power(beta1, step)
    correction2 = 1 - power(beta2, step)
    return {
        "lr": lr,
        "weight_decay": weight_decay,
        "decay": 1 - lr * weight_decay,
        "weight1": 1 - beta1,
        "beta2": beta2,
        "weight2": 1 - beta2,
        "correction1": correction1,
        "correction2": correction2,
        "root2": sqrt(correction2),
        "step_size": lr / correction1,
        "eps": eps,
    }


def update(
    p: Any, g: Any, exp_avg: Any, exp_avg_sq: Any, *,
    lr: Any, weight_decay: Any, decay: Any, weight1: Any, beta2: Any, weight2: Any, correction1: Any, correction2: Any,
    root2: Any, step_size: Any, eps: Any, decoupled: bool, te: bool,
) -> Any:  # fmt: skip
    if decoupled and not te:
        p = p * decay
    if not decoupled and weight_decay != 0:  # zero times an infinite parameter would be NaN
        g = fma(p, weight_decay, g)
    exp_avg = fma(weight1, g - exp_avg, exp_avg)
    exp_avg_sq = fma(weight2 * g, g, exp_avg_sq * beta2)
    if te:
        root = sqrt(exp_avg_sq / correction2) + eps
        direction = (exp_avg / correction1) / root
        if decoupled and weight_decay != 0:
            direction = direction + weight_decay * p
        return p - lr * direction, exp_avg, exp_avg_sq
    return p - step_size * exp_avg / (sqrt(exp_avg_sq) / root2 + eps), exp_avg, exp_avg_sq


ADAM = Formula(
    name="adam",
    states=(State(name="exp_avg"), State(name="exp_avg_sq", signed=False)),
    scalars=scalars,
    update=update,
    constants=(("decoupled", True), ("te", False)),
)
