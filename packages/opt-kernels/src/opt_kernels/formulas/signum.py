"""Signum (Bernstein et al. 2018, arXiv 1802.04434, algorithm 2): the sign of a momentum. With momentum 0 it is signSGD.

With g the scaled gradient and m the momentum:

    m <- b * m + (1 - b) * g        sign(0) = 0, sign(NaN) = NaN
    p <- p - lr * (sign(m) + wd * p)

b is the number `momentum`, m the state momentum_buffer.
"""

from opt_kernels.formulas.formula import Formula, State
from opt_kernels.formulas.functions import fma, sign
from opt_kernels.works import Number


def scalars(*, lr, weight_decay, momentum):
    return {"lr": lr, "decay": 1 - lr * weight_decay, "weight": 1 - momentum}


def update(p, g, momentum_buffer, *, lr, decay, weight):
    momentum_buffer = fma(weight, g - momentum_buffer, momentum_buffer)
    return p * decay - lr * sign(momentum_buffer), momentum_buffer


SIGNUM = Formula(
    name="signum",
    title="Signum",
    states=(State("momentum_buffer", beta="momentum", gives_signs=True),),
    numbers=(Number("lr", 1e-4), Number("momentum", 0.9, low=0.0, below=1.0)),
    scalars=scalars,
    update=update,
)
