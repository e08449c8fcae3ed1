"""`param.main_grad`: the view of a buffer in which the gradient of a parameter accumulates."""

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from opt_paramgroups import ParamId


class GradientError(RuntimeError):
    """A gradient arrived at the wrong time or in the wrong tensor, or a check rejected it."""


class UnusableGradientError(GradientError):
    """Gradients must not be used. Their reduction is complete on all ranks.

    In a step it is noted, and every rank refuses the step. Outside of one, the rank that raises it may leave its peers
    waiting in their next collective.
    """


class RefusedGradientError(UnusableGradientError):
    """A check of gradients over all replicas has refused them, on every rank."""


class SparseGradientError(UnusableGradientError, ValueError):
    """A gradient is sparse."""

    def __init__(self, name: str, layout: torch.layout):
        super().__init__(
            f"gradient of {name!r} is {layout}; dense (torch.strided) gradients are allowed: build nn.Embedding "
            "and nn.EmbeddingBag with sparse=False"
        )


_NOT_PICKLED = frozenset({"main_grad", "grad_added_to_main_grad", "__getstate__"})


# Attributes of parameters: `main_grad`, and the flags of fused weight-gradient kernels. Such a kernel adds its product
# directly to ``param.main_grad``, sets ``param.grad_added_to_main_grad = True`` and returns an arbitrary gradient to
# autograd, so that hooks still run. The returned gradient is dropped, or, if the kernel also set
# ``param.zero_out_wgrad = True`` because it is zero, added.
def bind_main_grad(param: nn.Parameter, view: Tensor) -> None:
    """Set ``param.main_grad`` to a view of a gradient buffer, in which the gradient accumulates."""
    param.main_grad = view  # type: ignore[attr-defined]
    param.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def leave_out_of_pickles(param: nn.Parameter) -> None:
    """Pickle the parameter without the attributes of `bind_main_grad`: gradients of its copy accumulate in no buffer.

    `torch.save(ddp.module)` would write the whole buffer, and the copy could not be trained. `deepcopy` keeps no
    attributes of a parameter.
    """
    weak = ref(param)

    def state() -> dict[str, Any]:
        return {name: value for name, value in vars(weak()).items() if name not in _NOT_PICKLED}

    param.__getstate__ = state  # type: ignore[method-assign]  # of this parameter: its pickle asks the instance


def main_grad(param: nn.Parameter) -> Tensor:
    """The bound gradient of a parameter."""
    view: Tensor = param.main_grad  # type: ignore[attr-defined]
    return view


@torch.no_grad()
def adopt_main_grad_(param: nn.Parameter, view: Tensor, id: ParamId) -> None:
    """If the caller bound another tensor to ``param.main_grad``, copy it to `view`, and bind `view` again.

    Callers of Megatron-Core rescale with ``param.main_grad = param.main_grad * factor``. Reductions use the buffer, so
    the value must be copied there.

    Raises:
        GradientError: ``param.main_grad`` is not a tensor of the parameter's shape.
    """
    current = getattr(param, "main_grad", None)
    if current is view:
        return
    if not isinstance(current, Tensor) or current.shape != view.shape:
        given = f"a tensor of shape {tuple(current.shape)}" if isinstance(current, Tensor) else repr(current)
        raise GradientError(
            f"main_grad of {id} was replaced by {given}; it must be a tensor of shape {tuple(view.shape)}: write "
            "into it (param.main_grad.mul_(2)), or assign a tensor of that shape"
        )
    view.copy_(current.detach().clone())  # a clone: `current` may be another view of the same memory
    param.main_grad = view  # type: ignore[attr-defined]


@torch.no_grad()
def take_grad_(param: nn.Parameter, id: ParamId) -> None:
    """Add ``param.grad`` to ``param.main_grad``, unless a fused kernel has done so, and drop ``param.grad``.

    Autograd does not record the sum, even if ``backward(create_graph=True)`` gave the gradient a graph.

    Raises:
        SparseGradientError: the gradient is sparse.
    """
    grad = param.grad
    if grad is None:
        return
    if grad.layout is not torch.strided:
        raise SparseGradientError(str(id), grad.layout)
    fused = getattr(param, "grad_added_to_main_grad", False) and not getattr(param, "zero_out_wgrad", False)
    if not fused:
        main_grad(param).add_(grad)
    param.grad = None
