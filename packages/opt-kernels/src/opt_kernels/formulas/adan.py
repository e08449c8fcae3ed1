"""Adan (Xie et al. 2022, arXiv 2208.06677, algorithm 1), with the bias corrections and betas of the authors' code.

With g the scaled gradient, d its change since the last step (0 at the first), and t the step (from 1):

    m <- b1 * m + (1 - b1) * g
    u <- b2 * u + (1 - b2) * d
    n <- b3 * n + (1 - b3) * (g + b2 * d)^2
    p <- (p - lr * (m / (1 - b1^t) + b2 * u / (1 - b2^t)) / (sqrt(n / (1 - b3^t)) + eps)) / (1 + lr * wd)

`betas` are the factors by which averages decay: the paper's are 1 - b. With `no_prox` weights are decayed as in AdamW,
before the update and by the factor 1 - lr * wd. exp_avg, exp_avg_diff and exp_avg_sq are m, u and n.
"""

from opt_kernels.formulas.formula import Formula, State
from opt_kernels.formulas.functions import fma, power, sqrt, where
from opt_kernels.works import Choice, Number


def scalars(*, lr, weight_decay, beta1, beta2, beta3, eps, step):
    return {
        "is_first": where(step == 1, 1.0, 0.0),
        "decay": 1 - lr * weight_decay,
        "growth": 1 + lr * weight_decay,
        "weight1": 1 - beta1,
        "beta2": beta2,
        "weight2": 1 - beta2,
        "beta3": beta3,
        "weight3": 1 - beta3,
        "step_size": lr / (1 - power(beta1, step)),
        "diff_size": lr * beta2 / (1 - power(beta2, step)),
        "root3": sqrt(1 - power(beta3, step)),
        "eps": eps,
    }


def update(
    p,
    g,
    exp_avg,
    exp_avg_diff,
    exp_avg_sq,
    previous_grad,
    *,
    is_first,
    decay,
    growth,
    weight1,
    beta2,
    weight2,
    beta3,
    weight3,
    step_size,
    diff_size,
    root3,
    eps,
    no_prox,
):
    change = g - where(is_first != 0, g, previous_grad)
    ahead = fma(beta2, change, g)
    exp_avg = fma(weight1, g - exp_avg, exp_avg)
    exp_avg_diff = fma(weight2, change - exp_avg_diff, exp_avg_diff)
    exp_avg_sq = fma(weight3 * ahead, ahead, exp_avg_sq * beta3)
    p = p * decay if no_prox else p
    p = p - fma(diff_size, exp_avg_diff, step_size * exp_avg) / (sqrt(exp_avg_sq) / root3 + eps)
    return p if no_prox else p / growth, exp_avg, exp_avg_diff, exp_avg_sq, g


STATES = (
    State("exp_avg", beta="beta1"),
    State("exp_avg_diff", beta="beta2"),
    State("exp_avg_sq", signed=False, beta="beta3"),
    State("previous_grad"),
)

ADAN = Formula(
    name="adan",
    title="Adan",
    states=STATES,
    numbers=(Number("betas", (0.98, 0.92, 0.99)), Number("eps", 1e-8)),
    choices=(Choice("no_prox", False),),
    scalars=scalars,
    update=update,
)
