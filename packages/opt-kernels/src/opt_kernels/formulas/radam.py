"""RAdam (Liu et al. 2020, arXiv 1908.03265, algorithm 2, in the form of torch.optim.RAdam).

With g the scaled gradient, t the step (from 1), r = 2 / (1 - b2) - 1 and r(t) = r - 2 t b2^t / (1 - b2^t):

    g <- g + wd * p            if weight decay is not decoupled
    p <- p - lr * wd * p       if it is
    m <- b1 * m + (1 - b1) * g        v <- b2 * v + (1 - b2) * g^2
    p <- p - lr * m / (1 - b1^t) * l            where, if r(t) > 5,
    l = sqrt((r(t) - 4) (r(t) - 2) r / ((r - 4) (r - 2) r(t))) * sqrt(1 - b2^t) / (sqrt(v) + eps),  else l = 1

exp_avg and exp_avg_sq are m and v.
"""

from opt_kernels.formulas.adam import MOMENTS, NUMBERS
from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.functions import fma, maximum, power, sqrt, where
from opt_kernels.works import Choice


def scalars(*, lr, weight_decay, beta1, beta2, eps, step):
    correction2 = 1 - power(beta2, step)
    r = 2 / (1 - beta2) - 1
    r_now = r - 2 * step * power(beta2, step) / correction2
    # If r(t) <= 5 the ratio is unused and may have any sign.
    ratio = (r_now - 4) * (r_now - 2) * r / maximum((r - 4) * (r - 2) * r_now, 1e-30)
    return {
        "weight_decay": weight_decay,
        "decay": 1 - lr * weight_decay,
        "weight1": 1 - beta1,
        "beta2": beta2,
        "weight2": 1 - beta2,
        "step_size": lr / (1 - power(beta1, step)),
        "is_rectified": where(r_now > 5, 1.0, 0.0),
        "rectified": sqrt(where(r_now > 5, ratio, 0.0) * correction2),
        "eps": eps,
    }


def update(
    p,
    g,
    exp_avg,
    exp_avg_sq,
    *,
    weight_decay,
    decay,
    weight1,
    beta2,
    weight2,
    step_size,
    is_rectified,
    rectified,
    eps,
    decoupled_weight_decay,
):
    if decoupled_weight_decay:
        p = p * decay
    elif weight_decay != 0:
        g = fma(p, weight_decay, g)
    exp_avg = fma(weight1, g - exp_avg, exp_avg)
    exp_avg_sq = fma(weight2 * g, g, exp_avg_sq * beta2)
    direction = step_size * exp_avg
    if is_rectified != 0:
        direction = direction * (rectified / (sqrt(exp_avg_sq) + eps))
    return p - direction, exp_avg, exp_avg_sq


RADAM = Formula(
    name="radam",
    title="RAdam",
    states=MOMENTS,
    numbers=NUMBERS,
    choices=(Choice("decoupled_weight_decay", False),),
    scalars=scalars,
    update=update,
)
