"""Lion (Chen et al. 2023, algorithm 2).

With g the scaled gradient and m the momentum:

    u = sign(b1 * m + (1 - b1) * g)        sign(0) = 0, sign(NaN) = NaN
    p <- p - lr * (u + wd * p)
    m <- b2 * m + (1 - b2) * g
"""

from typing import Any

from opt_kernels.formulas.formula import Formula, State
from opt_kernels.formulas.functions import fma, sign
from opt_kernels.works import Number


def scalars(*, lr: float, weight_decay: float, beta1: float, beta2: float) -> dict[str, float]:
    return {"lr": lr, "decay": 1 - lr * weight_decay, "weight1": 1 - beta1, "weight2": 1 - beta2}


def update(p: Any, g: Any, exp_avg: Any, *, lr: Any, decay: Any, weight1: Any, weight2: Any) -> Any:
    direction = sign(fma(weight1, g - exp_avg, exp_avg))
    return p * decay - lr * direction, fma(weight2, g - exp_avg, exp_avg)


LION = Formula(
    name="lion",
    title="Lion",
    states=(State("exp_avg", beta="beta2"),),
    numbers=(Number("lr", 1e-4), Number("betas", (0.9, 0.99))),
    scalars=scalars,
    update=update,
)
