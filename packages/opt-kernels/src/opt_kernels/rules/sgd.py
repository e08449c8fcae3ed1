"""SGD with momentum."""

from typing import Any

from opt_kernels.formulas.sgd import SGD as FORMULA
from opt_kernels.rules.elementwise import ElementwiseRule, elementwise


def SGD(
    *, momentum_buffer: bool = True, nesterov: bool = False, dampening: float = 0.0, **options: Any
) -> ElementwiseRule:
    """Gradient descent, with momentum by default (Sutskever et al. 2013, in the form of torch.optim.SGD).

    `momentum_buffer=False` is plain descent without a state. `dampening` is the default of groups. Further options:
    `momentum_buffer_dtype` and those of `opt_kernels.rules.elementwise.elementwise`. The formula is in
    `formulas/sgd.py`. Raises ValueError for nesterov with dampening or without a buffer.
    """
    if nesterov and (dampening or not momentum_buffer):
        raise ValueError(
            f"nesterov=True with dampening={dampening}, momentum_buffer={momentum_buffer}: Nesterov momentum needs a "
            "buffer and no dampening; pass dampening=0.0 and momentum_buffer=True"
        )
    formula = FORMULA.with_defaults(dampening=dampening)
    return elementwise(formula, nesterov=nesterov, has_momentum=momentum_buffer, **options)
