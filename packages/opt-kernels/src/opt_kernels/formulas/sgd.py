"""SGD with momentum (Sutskever et al. 2013, in the form of torch.optim.SGD), and plain gradient descent.

With g the scaled gradient and b the momentum buffer:

    g <- g + wd * p
    b <- g at the first step, then  momentum * b + (1 - dampening) * g
    g <- g + momentum * b  where nesterov, else  b
    p <- p - lr * g

Plain descent has no buffer, and leaves out the second and third lines.
"""

from typing import Any

from opt_kernels.formulas.formula import Formula, State
from opt_kernels.formulas.functions import fma, where


def scalars(*, lr: float, weight_decay: float, momentum: float, step: float, dampening: float) -> dict[str, float]:
    return {
        "lr": lr,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "weight": 1 - dampening,
        "is_first": where(step == 1, 1.0, 0.0),
    }


def update(
    p: Any, g: Any, momentum_buffer: Any, *,
    lr: Any, weight_decay: Any, momentum: Any, weight: Any, is_first: Any, nesterov: bool,
) -> Any:  # fmt: skip
    if weight_decay != 0:  # zero times an infinite parameter would be NaN
        g = fma(p, weight_decay, g)
    momentum_buffer = where(is_first != 0, g, fma(momentum_buffer, momentum, g * weight))
    g = fma(momentum_buffer, momentum, g) if nesterov else momentum_buffer
    return p - lr * g, momentum_buffer


def plain_scalars(*, lr: float, weight_decay: float) -> dict[str, float]:
    return {"lr": lr, "weight_decay": weight_decay}


def plain_update(p: Any, g: Any, *, lr: Any, weight_decay: Any) -> Any:
    if weight_decay != 0:
        g = fma(p, weight_decay, g)
    return p - lr * g


SGD = Formula(
    name="sgd",
    states=(State(name="momentum_buffer"),),
    scalars=scalars,
    update=update,
    constants=(("dampening", 0.0), ("nesterov", False)),
)
PLAIN_SGD = Formula(name="sgd_plain", states=(), scalars=plain_scalars, update=plain_update)
