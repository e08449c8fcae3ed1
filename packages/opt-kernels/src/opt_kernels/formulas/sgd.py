"""SGD with momentum (Sutskever et al. 2013, in the form of torch.optim.SGD), and plain gradient descent.

With g the scaled gradient and b the momentum buffer:

    g <- g + wd * p
    b <- g at the first step, then  momentum * b + (1 - dampening) * g
    g <- g + momentum * b  with nesterov, else  b
    p <- p - lr * g

With zero momentum there is no buffer, and the second and third lines are skipped.
"""

from opt_kernels.formulas.formula import Formula, State
from opt_kernels.formulas.functions import fma, where
from opt_kernels.works import Choice, Number


def scalars(*, lr, weight_decay, momentum, step, dampening):
    return {
        "lr": lr,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "weight": 1 - dampening,
        "is_first": where(step == 1, 1.0, 0.0),
    }


def update(p, g, momentum_buffer, *, lr, weight_decay, momentum, weight, is_first, nesterov, has_momentum):
    if weight_decay != 0:  # zero times an infinite parameter would be NaN
        g = fma(p, weight_decay, g)
    if has_momentum:
        momentum_buffer = where(is_first != 0, g, fma(momentum_buffer, momentum, g * weight))
        g = fma(momentum_buffer, momentum, g) if nesterov else momentum_buffer
    return p - lr * g, momentum_buffer


SGD = Formula(
    name="sgd",
    title="SGD",
    states=(State("momentum_buffer", when="has_momentum", beta="momentum"),),
    numbers=(Number("momentum", 0.0), Number("dampening", 0.0)),
    choices=(Choice("nesterov", False), Choice("has_momentum", True, off_at_zero="momentum")),
    scalars=scalars,
    update=update,
)
