"""Lion (Chen et al. 2023, algorithm 2).

With g the scaled gradient and m the momentum:

    u = sign(b1 * m + (1 - b1) * g)        sign(0) = 0, sign(NaN) = NaN
    p <- p - lr * (u + wd * p)
    m <- b2 * m + (1 - b2) * g
"""

from opt_kernels.formulas.formula import Formula, State
from opt_kernels.formulas.functions import fma, sign
from opt_kernels.works import Number


def scalars(*, lr, weight_decay, beta1, beta2):
    return {"lr": lr, "decay": 1 - lr * weight_decay, "weight1": 1 - beta1, "weight2": 1 - beta2}


def update(p, g, exp_avg, *, lr, decay, weight1, weight2):
    direction = sign(fma(weight1, g - exp_avg, exp_avg))
    return p * decay - lr * direction, fma(weight2, g - exp_avg, exp_avg)


LION = Formula(
    name="lion",
    title="Lion",
    states=(State("exp_avg", beta="beta2", gives_signs=True),),
    numbers=(Number("lr", 1e-4), Number("betas", (0.9, 0.99))),
    scalars=scalars,
    update=update,
)
