"""LaProp (Ziyin, Wang & Ueda 2020, arXiv 2002.04839, algorithm 1): momentum of normalised gradients.

With g the scaled gradient and t the step (from 1):

    n <- b2 * n + (1 - b2) * g^2
    m <- b1 * m + (1 - b1) * g / (sqrt(n / (1 - b2^t)) + eps)
    p <- p - lr * (m / (1 - b1^t) + wd * p)

The paper's mu and nu are b1 and b2; exp_avg and exp_avg_sq are m and n.
"""

from opt_kernels.formulas.adam import MOMENTS
from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.functions import fma, power, sqrt
from opt_kernels.works import Number


def scalars(*, lr, weight_decay, beta1, beta2, eps, step):
    return {
        "decay": 1 - lr * weight_decay,
        "weight1": 1 - beta1,
        "beta2": beta2,
        "weight2": 1 - beta2,
        "step_size": lr / (1 - power(beta1, step)),
        "root2": sqrt(1 - power(beta2, step)),
        "eps": eps,
    }


def update(p, g, exp_avg, exp_avg_sq, *, decay, weight1, beta2, weight2, step_size, root2, eps):
    exp_avg_sq = fma(weight2 * g, g, exp_avg_sq * beta2)
    normalised = g / (sqrt(exp_avg_sq) / root2 + eps)
    exp_avg = fma(weight1, normalised - exp_avg, exp_avg)
    return p * decay - step_size * exp_avg, exp_avg, exp_avg_sq


LAPROP = Formula(
    name="laprop",
    title="LaProp",
    states=MOMENTS,
    numbers=(Number("lr", 4e-4), Number("betas", (0.9, 0.999)), Number("eps", 1e-15)),
    scalars=scalars,
    update=update,
)
