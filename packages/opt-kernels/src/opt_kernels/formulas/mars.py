"""MARS-AdamW (Yuan et al. 2024, arXiv 2411.10438, algorithm 2 with the previous step's gradient): reduced variance.

With g the scaled gradient, g' that of the last step (zero at the first), and t the step (from 1):

    c = g + gamma * b1 / (1 - b1) * (g - g')
    m <- b1 * m + (1 - b1) * c        v <- b2 * v + (1 - b2) * c^2
    p <- p - lr * ((m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + wd * p)

exp_avg and exp_avg_sq are m and v. These are the equations of the authors' code ("mars-adamw"), with these differences:

- The authors scale c of each parameter to a norm of at most 1. That is not elementwise and not done here, so results
  are equal while the norm of every c stays below 1. To bound it, clip the norm of the gradients.
- All parameters use these equations, as with the authors' `optimize_1d=True`. Their default updates vectors by AdamW
  with other betas and decay: give vectors to `AdamW`.
- There is no `amsgrad`, and no "mars-lion" or "mars-shampoo".

The paper starts from g' = g, so that the first c is g; the authors' code starts from g' = 0, as here. Their exact
variant (`is_approx=False`) takes g' at the previous weights with the data of this step: before each step after the
first, write that gradient to the state `previous_grad`.
"""

from opt_kernels.formulas.adam import MOMENTS
from opt_kernels.formulas.formula import Formula, State
from opt_kernels.formulas.functions import fma, power, sqrt
from opt_kernels.works import Number


def scalars(*, lr, weight_decay, beta1, beta2, eps, gamma, step):
    return {
        "correction": gamma * beta1 / (1 - beta1),
        "decay": 1 - lr * weight_decay,
        "weight1": 1 - beta1,
        "beta2": beta2,
        "weight2": 1 - beta2,
        "step_size": lr / (1 - power(beta1, step)),
        "root2": sqrt(1 - power(beta2, step)),
        "eps": eps,
    }


def update(
    p, g, exp_avg, exp_avg_sq, previous_grad, *, correction, decay, weight1, beta2, weight2, step_size, root2, eps
):
    c = fma(correction, g - previous_grad, g)
    exp_avg = fma(weight1, c - exp_avg, exp_avg)
    exp_avg_sq = fma(weight2 * c, c, exp_avg_sq * beta2)
    return p * decay - step_size * exp_avg / (sqrt(exp_avg_sq) / root2 + eps), exp_avg, exp_avg_sq, g


MARS = Formula(
    name="mars",
    title="MARSAdamW",
    states=(*MOMENTS, State("previous_grad")),
    numbers=(
        Number("lr", 3e-3),
        Number("betas", (0.95, 0.99)),
        Number("eps", 1e-8),
        Number("weight_decay", 0.0),
        Number("gamma", 0.025, low=0.0),
    ),
    scalars=scalars,
    update=update,
)
