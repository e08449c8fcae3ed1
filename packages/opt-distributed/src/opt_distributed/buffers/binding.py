"""The only place that hangs something on a parameter: `main_grad`, and the flags of fused weight-gradient kernels.

Such a kernel adds its product straight into ``param.main_grad``, sets ``param.grad_added_to_main_grad = True`` and
returns a gradient of any content to autograd, so that hooks still run. What it returned is dropped, or, where the
kernel also set ``param.zero_out_wgrad = True`` because it holds zeros, added.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from opt_paramgroups import ParamId


class GradientError(RuntimeError):
    """Gradients that arrived at the wrong time, in the wrong tensor, or that a check rejected."""


class UnusableGradientError(GradientError):
    """Gradients that must not be used, although their reduction is complete: no rank waits for the one that raises."""


def bind_main_grad(param: nn.Parameter, view: Tensor) -> None:
    """Sets ``param.main_grad``: a view of a gradient buffer in its shape, where its gradient accumulates."""
    param.main_grad = view  # type: ignore[attr-defined]
    param.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def main_grad(param: nn.Parameter) -> Tensor:
    """The bound gradient of a parameter."""
    view: Tensor = param.main_grad  # type: ignore[attr-defined]
    return view


def is_bound(param: nn.Parameter) -> bool:
    """Whether its gradient accumulates in a buffer, so that ``param.grad`` stays empty."""
    return getattr(param, "main_grad", None) is not None


def check_unbound(params: Mapping[ParamId, nn.Parameter]) -> None:
    """Raises ValueError where a gradient accumulates elsewhere already: it would be added there, and again here."""
    bound = [str(id) for id, param in params.items() if is_bound(param)]
    if bound:
        raise ValueError(
            f"gradients of {bound[0]!r} (and {len(bound) - 1} more) accumulate in a buffer already: a model chunk is "
            "wrapped once; use that wrapper, or a new model"
        )


def begin_accumulation(param: nn.Parameter, view: Tensor) -> None:
    """Binds `view` again, and resets the fused kernels' flag and what a failed backward left in ``param.grad``."""
    param.grad = None
    bind_main_grad(param, view)


def is_rebound(param: nn.Parameter, view: Tensor) -> bool:
    """Whether ``param.main_grad`` is another tensor than the view of the buffer."""
    return getattr(param, "main_grad", None) is not view


@torch.no_grad()
def adopt_main_grad_(param: nn.Parameter, view: Tensor, name: str) -> None:
    """Writes `view`: the tensor that the caller bound to ``param.main_grad`` in its place, if any; binds `view` again.

    Megatron-Core's callers rescale with ``param.main_grad = param.main_grad * factor``. The buffer is what is reduced,
    so the value moves there.

    Raises:
        GradientError: ``param.main_grad`` is not a tensor of the parameter's shape.
    """
    current = getattr(param, "main_grad", None)
    if current is view:
        return
    if not isinstance(current, Tensor) or current.shape != view.shape:
        found = f"a tensor of shape {tuple(current.shape)}" if isinstance(current, Tensor) else repr(current)
        raise GradientError(
            f"main_grad of {name} was replaced by {found}; it must be a tensor of shape {tuple(view.shape)}: write "
            "into it (param.main_grad.mul_(2)), or assign a tensor of that shape"
        )
    view.copy_(current.detach().clone())  # a clone: `current` may be another view of the same memory
    param.main_grad = view  # type: ignore[attr-defined]


@torch.no_grad()
def take_grad_(param: nn.Parameter) -> None:
    """Adds ``param.grad`` to ``param.main_grad``, unless a fused kernel has done so, and drops ``param.grad``.

    The sum is outside of autograd, also where ``backward(create_graph=True)`` made a graph of the gradient.

    Raises:
        ValueError: the gradient is sparse.
    """
    grad = param.grad
    if grad is None:
        return
    if grad.layout is not torch.strided:
        raise ValueError(f"a gradient is {grad.layout}; buffers take dense ones (nn.Embedding(sparse=False))")
    fused = getattr(param, "grad_added_to_main_grad", False) and not getattr(param, "zero_out_wgrad", False)
    if not fused:
        main_grad(param).add_(grad)
    param.grad = None


def unbind(param: nn.Parameter) -> None:
    """Removes what `bind_main_grad` set."""
    for name in ("main_grad", "grad_added_to_main_grad"):
        if hasattr(param, name):
            delattr(param, name)
