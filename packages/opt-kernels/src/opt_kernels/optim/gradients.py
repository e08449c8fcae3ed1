"""The gradients of an optimizer: their total norm, and whether a step only creates state."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opt_kernels.backends.grad_stats import grad_stats
from opt_kernels.dtensor import is_dtensor, local
from opt_kernels.optim.param_rows import params_of


def norm_of_gradients(params: Sequence[Tensor], max_norm: float) -> float:
    """The total norm over all devices, read on the host. Infinite or NaN if any gradient is.

    Raises ValueError for a DTensor parameter."""
    check_norm_spans_no_ranks(params, max_norm)
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in [param.grad for param in params if param.grad is not None]:
        by_device.setdefault(grad.device, []).append(grad)
    sums = [grad_stats(grads, count_zeros=False).sum_of_squares for grads in by_device.values()]
    return math.sqrt(sum(float(total) for total in sums))


def clipped(params: Sequence[Tensor], scale: float, max_norm: float) -> tuple[float, float | None]:
    """The total norm of the gradients times `scale`, and the factor that also clips it; None if it is not finite."""
    norm = scale * norm_of_gradients(params, max_norm)
    return norm, scale * min(1.0, max_norm / (norm + 1e-6)) if norm < math.inf else None


def check_norm_spans_no_ranks(params: Sequence[Tensor], max_norm: float) -> None:
    """Raise ValueError for a DTensor parameter, whose norm spans ranks."""
    if any(map(is_dtensor, params)):
        raise ValueError(
            f"max_norm={max_norm} with a DTensor parameter: its norm spans ranks, and this optimizer does not "
            "communicate; set max_norm=None and call torch.nn.utils.clip_grad_norm_"
        )


def only_makes_state(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all gradients and learning rates are zero in this first step. `torch.distributed.checkpoint` runs such a
    step to create state that it can save or load into. It must not count as a step."""
    grads = [param.grad for param in params_of(groups) if param.grad is not None]
    return all(float(group["lr"]) == 0 for group in groups) and not any(map(torch.any, map(local, grads)))
