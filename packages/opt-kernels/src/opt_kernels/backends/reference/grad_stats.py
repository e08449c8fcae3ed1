"""Reference version of gradient statistics: sum of squares, non-finite elements and zeros, in float64."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class GradStats(NamedTuple):
    """Sums over all elements of all gradients, each a 0-d tensor on their device. Sums over ranks add up."""

    sum_of_squares: Tensor  # float64; of |g|^p for another norm_type p, and the maximum of |g| for infinity
    nonfinite: Tensor  # int64: elements that are infinite or NaN
    zeros: Tensor  # int64: elements equal to zero; 0 if they were not counted


def grad_stats(grads: Sequence[Tensor], *, count_zeros: bool = True, norm_type: float = 2.0) -> GradStats:
    """Statistics of `grads`, of any shapes and float dtypes, which are only read.

    `norm_type` p > 0 (infinity included) gives sum |g|^p, or max |g|. Raises ValueError for any other.
    """
    check_norm_type(norm_type)
    device = grads[0].device if grads else torch.device("cpu")
    power = torch.zeros((), dtype=torch.float64, device=device)
    nonfinite = torch.zeros((), dtype=torch.int64, device=device)
    zeros = torch.zeros((), dtype=torch.int64, device=device)
    for grad in grads:
        size = grad.to(torch.float64).abs()
        if math.isinf(norm_type):
            # maximum() keeps NaN where max() of an empty tensor would raise.
            power = torch.maximum(power, torch.cat([size.flatten(), power.view(1)]).max())
        else:
            power = power + size.pow(norm_type).sum()
        nonfinite = nonfinite + (~size.isfinite()).sum()
        if count_zeros:
            zeros = zeros + (size == 0).sum()
    return GradStats(power, nonfinite, zeros)


def check_norm_type(norm_type: float) -> None:
    """Raise ValueError unless `norm_type` is a number above zero, or infinity."""
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type!r} is not a norm; pass a number above 0, or math.inf for the maximum")
