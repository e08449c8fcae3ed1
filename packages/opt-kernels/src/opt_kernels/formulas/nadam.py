"""NAdam (Dozat 2016, in the form of torch.optim.NAdam): Adam with Nesterov momentum.

With g the scaled gradient, t the step (from 1), and M(t) the product of mu(1) to mu(t):

    g <- g + wd * p            if weight decay is not decoupled
    p <- p - lr * wd * p       if it is
    mu(t) = b1 * (1 - 0.96^(t * momentum_decay) / 2)
    m <- b1 * m + (1 - b1) * g        v <- b2 * v + (1 - b2) * g^2
    p <- p - lr * ((1 - mu(t)) / (1 - M(t)) * g + mu(t+1) / (1 - M(t+1)) * m) / (sqrt(v / (1 - b2^t)) + eps)

exp_avg and exp_avg_sq are m and v. M(t) is computed from t; torch keeps it as a state.
"""

from opt_kernels.formulas.adam import MOMENTS
from opt_kernels.formulas.formula import Formula
from opt_kernels.formulas.functions import exp, fma, log, power, q_pochhammer, sqrt
from opt_kernels.works import Choice, Number


def scalars(*, lr, weight_decay, beta1, beta2, eps, momentum_decay, step):
    q = exp(momentum_decay * log(0.96))
    mu = beta1 * (1 - 0.5 * exp(step * log(q)))
    next_mu = beta1 * (1 - 0.5 * exp((step + 1) * log(q)))
    product = power(beta1, step) * q_pochhammer(0.5 * q, q, step)
    return {
        "weight_decay": weight_decay,
        "decay": 1 - lr * weight_decay,
        "weight1": 1 - beta1,
        "beta2": beta2,
        "weight2": 1 - beta2,
        "root2": sqrt(1 - power(beta2, step)),
        "grad_size": lr * (1 - mu) / (1 - product),
        "step_size": lr * next_mu / (1 - product * next_mu),
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
    root2,
    grad_size,
    step_size,
    eps,
    decoupled_weight_decay,
):
    if decoupled_weight_decay:
        p = p * decay
    elif weight_decay != 0:
        g = fma(p, weight_decay, g)
    exp_avg = fma(weight1, g - exp_avg, exp_avg)
    exp_avg_sq = fma(weight2 * g, g, exp_avg_sq * beta2)
    return p - fma(step_size, exp_avg, grad_size * g) / (sqrt(exp_avg_sq) / root2 + eps), exp_avg, exp_avg_sq


NADAM = Formula(
    name="nadam",
    title="NAdam",
    states=MOMENTS,
    numbers=(
        Number("lr", 2e-3),
        Number("betas", (0.9, 0.999)),
        Number("eps", 1e-8),
        Number("weight_decay", 0.0),
        Number("momentum_decay", 4e-3, low=0.0),
    ),
    choices=(Choice("decoupled_weight_decay", False),),
    scalars=scalars,
    update=update,
)
