"""Adam and AdamW (Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2).

With g the scaled gradient, t the step (from 1), and m, v the moments:

    g <- g + wd * p            if weight decay is not decoupled
    p <- p - lr * wd * p       if it is
    m <- m + (1 - b1) * (g - m)        v <- b2 * v + (1 - b2) * g^2
    order "torch":  p <- p - (lr / (1 - b1^t)) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
    order "te":     p <- p - lr * ((m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + wd * p)

The orders agree except for rounding: "torch" is that of torch.optim.AdamW(fused=True), "te" Transformer Engine's, which
decays within the update. With amsgrad (Reddi et al. 2018, algorithm 2), the largest v so far replaces v.
"""

from opt_kernels.formulas.formula import Formula, State
from opt_kernels.formulas.functions import fma, maximum, power, sqrt
from opt_kernels.works import Choice, Number


def scalars(*, lr, weight_decay, beta1, beta2, eps, step):
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
    p,
    g,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    *,
    lr,
    weight_decay,
    decay,
    weight1,
    beta2,
    weight2,
    correction1,
    correction2,
    root2,
    step_size,
    eps,
    decoupled_weight_decay,
    order,
    amsgrad,
):
    if decoupled_weight_decay and order == "torch":
        p = p * decay
    if not decoupled_weight_decay and weight_decay != 0:  # zero times an infinite parameter would be NaN
        g = fma(p, weight_decay, g)
    exp_avg = fma(weight1, g - exp_avg, exp_avg)
    exp_avg_sq = fma(weight2 * g, g, exp_avg_sq * beta2)
    second = maximum(max_exp_avg_sq, exp_avg_sq) if amsgrad else exp_avg_sq
    if order == "torch":
        p = p - step_size * exp_avg / (sqrt(second) / root2 + eps)
    else:
        root = sqrt(second / correction2) + eps  # first: fewer scalars occupy registers at once
        direction = (exp_avg / correction1) / root
        if decoupled_weight_decay and weight_decay != 0:
            direction = direction + weight_decay * p
        p = p - lr * direction
    return p, exp_avg, exp_avg_sq, second


MOMENTS = (State("exp_avg", beta="beta1"), State("exp_avg_sq", signed=False, beta="beta2"))
NUMBERS = (Number("betas", (0.9, 0.999)), Number("eps", 1e-8))

ADAM = Formula(
    name="adam",
    title="Adam",
    states=(*MOMENTS, State("max_exp_avg_sq", signed=False, when="amsgrad")),
    numbers=NUMBERS,
    choices=(
        Choice("amsgrad", False),
        Choice("decoupled_weight_decay", True),
        Choice("order", "torch", ("torch", "te"), recorded=False),
    ),
    scalars=scalars,
    update=update,
)
