"""AdEMAMix (Pagliardini et al. 2024, arXiv 2409.03137, algorithm 1): AdamW with a second, slow momentum.

With g the scaled gradient, t the step (from 1), m1 the fast and m2 the slow momentum, and v the second moment:

    m1 <- b1 * m1 + (1 - b1) * g        m2 <- b3(t) * m2 + (1 - b3(t)) * g        v <- b2 * v + (1 - b2) * g^2
    p <- p - lr * ((m1 / (1 - b1^t) + alpha(t) * m2) / (sqrt(v / (1 - b2^t)) + eps) + wd * p)

    alpha(t) = min(t / alpha_steps, 1) * alpha
    b3(t) = exp(ln(b1) ln(b3) / ((1 - s) ln(b3) + s ln(b1))),  s = min(t / beta3_steps, 1)

The paper warms both up over all training steps to avoid early divergence. With 0 steps they are constant.
`betas` are (b1, b2, b3), exp_avg, exp_avg_slow and exp_avg_sq are m1, m2 and v.
"""

from opt_kernels.formulas.formula import Formula, State
from opt_kernels.formulas.functions import exp, fma, log, maximum, minimum, power, sqrt
from opt_kernels.works import Number


def scalars(*, lr, weight_decay, beta1, beta2, beta3, eps, alpha, alpha_steps, beta3_steps, step):
    share = minimum(step / maximum(beta3_steps, 1.0), 1.0)
    fast = log(maximum(beta1, 1e-30))
    slow = log(maximum(beta3, 1e-30))
    beta3_now = exp(fast * slow / ((1 - share) * slow + share * fast))
    return {
        "decay": 1 - lr * weight_decay,
        "weight1": 1 - beta1,
        "beta2": beta2,
        "weight2": 1 - beta2,
        "weight3": 1 - beta3_now,
        "correction1": 1 - power(beta1, step),
        "root2": sqrt(1 - power(beta2, step)),
        "alpha": minimum(step / maximum(alpha_steps, 1.0), 1.0) * alpha,
        "lr": lr,
        "eps": eps,
    }


def update(
    p,
    g,
    exp_avg,
    exp_avg_slow,
    exp_avg_sq,
    *,
    decay,
    weight1,
    beta2,
    weight2,
    weight3,
    correction1,
    root2,
    alpha,
    lr,
    eps,
):
    exp_avg = fma(weight1, g - exp_avg, exp_avg)
    exp_avg_slow = fma(weight3, g - exp_avg_slow, exp_avg_slow)
    exp_avg_sq = fma(weight2 * g, g, exp_avg_sq * beta2)
    direction = fma(alpha, exp_avg_slow, exp_avg / correction1) / (sqrt(exp_avg_sq) / root2 + eps)
    return p * decay - lr * direction, exp_avg, exp_avg_slow, exp_avg_sq


NUMBERS = (
    Number("betas", (0.9, 0.999, 0.9999)),
    Number("eps", 1e-8),
    Number("weight_decay", 0.0),
    Number("alpha", 5.0, low=0.0),
    Number("alpha_steps", 0, low=0),
    Number("beta3_steps", 0, low=0),
)

ADEMAMIX = Formula(
    name="ademamix",
    title="AdEMAMix",
    states=(
        State("exp_avg", beta="beta1"),
        State("exp_avg_slow", beta="beta3"),
        State("exp_avg_sq", signed=False, beta="beta2"),
    ),
    numbers=NUMBERS,
    scalars=scalars,
    update=update,
)
