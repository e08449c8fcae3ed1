"""Gradients as modified by hooks before the rule."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opt_kernels.codecs import remainder
from opt_kernels.hooks.rows import RowMeans, subtract_row_means_
from opt_kernels.works import Work


def gradients(
    works: Sequence[Work],
    *,
    scale: float | Tensor,
    decay: float | Tensor,
    centralizes: bool,
    is_matrix: bool,
    row_means: Sequence[RowMeans | None],  # of each work; None: its rows are whole
) -> list[Tensor]:
    """scale * grad + decay * p of each work, minus the mean of each row with `centralizes`: new tensors.

    They have the compute dtype of the work. A row is one index of the first dim; in a stack of matrices, one index of
    all dims except the last.
    """
    return [
        _gradient(work, means, scale=scale, decay=decay, centralizes=centralizes, is_matrix=is_matrix)
        for work, means in zip(works, row_means, strict=True)
    ]


def _gradient(
    work: Work,
    means: RowMeans | None,
    *,
    scale: float | Tensor,
    decay: float | Tensor,
    centralizes: bool,
    is_matrix: bool,
) -> Tensor:
    main = _main(work)
    grad = torch.empty_like(main).copy_(work.grad).mul_(scale)
    if means is not None:
        subtract_row_means_(grad, means, scale=scale)
    elif centralizes and grad.dim() > 1 and grad.numel():
        dims = (-1,) if is_matrix else tuple(range(1, grad.dim()))
        grad -= grad.mean(dims, keepdim=True)
    if not isinstance(decay, float | int) or decay != 0:  # zero times an infinite parameter would be NaN
        grad += main * decay
    return grad


def _main(work: Work) -> Tensor:
    """The weights in the compute dtype of the work."""
    if work.main is not None:
        return work.main if work.main.dtype is torch.float64 else work.main.float()
    assert work.out is not None
    assert work.remainder is not None
    return remainder.join(work.out, work.remainder)
