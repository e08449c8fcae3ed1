"""The gradients of an optimizer: their total norm, and whether a step only creates state."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from opt_kernels.backends.grad_stats import grad_stats
from opt_kernels.dtensor import is_dtensor


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
