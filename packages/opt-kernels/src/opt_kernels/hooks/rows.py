"""Row means of gradients whose rows span ranks: local row sums, and subtraction of the reduced means.

The sums are float64. The mean of a row is rounded once, to the gradient's dtype: it differs from that of one process by
the rounding of a float32 mean.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class SpannedRows(NamedTuple):
    """The rows of one parameter, of which this rank stores parts."""

    num: int  # of the local parameter
    dims: int  # number of leading dims that index rows
    local_numel: int  # elements of one row on this rank
    whole_numel: int  # elements of one row on all ranks


class RowMeans(NamedTuple):
    """The means of the rows of which one work has elements."""

    means: Tensor  # (rows.num,) float64, of gradients before they are scaled
    rows: SpannedRows
    first: int  # index of the work's first element in the flattened local parameter


def add_row_sums_(sums: Tensor, grad: Tensor, rows: SpannedRows, *, first: int) -> None:
    """Add the row sums of `grad` to `sums` (rows.num,) float64.

    `grad` has the shape of the local parameter, or is a flat run of it that starts at element `first`.
    """
    for at, part, dims in _parts(grad, rows, first):
        sums[at] += part.sum(tuple(range(dims, part.dim())), dtype=torch.float64).view(-1)


def subtract_row_means_(grad: Tensor, of: RowMeans, *, scale: float | Tensor) -> None:
    """Subtract `scale` times the row mean from each element of `grad`, which was scaled already."""
    means = (of.means * scale).to(grad.dtype)
    for at, part, dims in _parts(grad, of.rows, of.first):
        part -= means[at].view(*part.shape[:dims], *[1] * (part.dim() - dims))


def _parts(x: Tensor, rows: SpannedRows, first: int) -> Iterator[tuple[slice, Tensor, int]]:
    """Views of `x`, the rows of which each has elements, and the number of its leading dims that index rows."""
    if x.dim() > 1:
        yield slice(0, rows.num), x, rows.dims
        return
    begin, width = 0, rows.local_numel
    while begin < x.numel():
        row, column = divmod(first + begin, width)
        num = 1 if column else max(1, (x.numel() - begin) // width)  # one partial row, or all whole rows
        end = min(begin + num * width - column, x.numel())
        yield slice(row, row + num), x[begin:end].view(num, -1), 1
        begin = end
