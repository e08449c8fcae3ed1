"""The only place that hangs something on a parameter: `main_grad`, and the flags of fused weight-gradient kernels.

Such a kernel adds its product straight into ``param.main_grad``, sets ``param.grad_added_to_main_grad = True`` and
returns a gradient of any content to autograd, so that hooks still run. What it returned is dropped, or, where the
kernel also set ``param.zero_out_wgrad = True`` because it holds zeros, added.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from opt_paramgroups import ParamId


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


def begin_accumulation(param: nn.Parameter) -> None:
    """Forgets what a fused kernel said in the last iteration, and what a backward that raised left behind."""
    param.grad = None
    param.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def take_grad_(param: nn.Parameter) -> None:
    """Adds ``param.grad`` to ``param.main_grad``, unless a fused kernel has done so, and lets go of it.

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
