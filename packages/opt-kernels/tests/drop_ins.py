"""Parameters, gradients and steps for tests of drop-in optimizers."""

from itertools import pairwise

import torch
from torch import Tensor, nn

from opt_kernels import optim
from opt_kernels.formulas import Formula, Number, State, fma
from opt_kernels.optim import catalogue, matrix_catalogue

MATRIX_NAMES = [*matrix_catalogue.__all__]
NAMES = [*catalogue.__all__, *MATRIX_NAMES]


def parameter(*shape, seed=0, dtype=torch.float32):
    values = torch.randn(shape or (6, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return nn.Parameter(values.to(dtype))


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def step(optimizer, *seeds, in_place=False):
    """The weights after a step with the gradients of each of these seeds."""
    params = params_of(optimizer)
    for seed in seeds:
        generator = torch.Generator().manual_seed(100 + seed)
        for param in params:
            grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param)
            if in_place and param.grad is not None:
                param.grad.copy_(grad)
            else:
                param.grad = grad
        optimizer.step()
    return [param.detach().clone() for param in params]


def built(name, params, **options):
    """The drop-in of this name; matrix rules with Adam for other parameters."""
    always = {"scalar_optimizer": "adam"} if name in MATRIX_NAMES else {}
    return getattr(optim, name)(params, **{**always, **options})


def states_of(optimizer):
    return [tensor for param in params_of(optimizer) for tensor in optimizer.state[param].values()]


def same(some, others):
    """Whether tensors have the same elements, NaNs among them, and everything else is equal."""
    return all(
        torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) if isinstance(a, Tensor) else a == b
        for a, b in zip(some, others, strict=True)
    )


def layers(*sizes):
    """Linear layers from each size to the next."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*of) for of in pairwise(sizes)))


def averaging_scalars(*, lr, beta1):
    return {"lr": lr, "weight": 1 - beta1}


def averaging(p, g, m, *, lr, weight):
    m = fma(weight, g - m, m)
    return p - lr * m, m


UNDECAYED = Formula(
    name="undecayed",
    states=(State("m"),),
    scalars=averaging_scalars,
    update=averaging,
    numbers=(Number("betas", (0.9, 0.99)),),
)
Undecayed = optim.drop_in(UNDECAYED)
"""A rule that reads neither weight_decay nor beta2."""
