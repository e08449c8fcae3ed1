"""Row means of gradients whose rows span ranks: any cut of a parameter gives the means of the whole."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from opt_kernels.hooks import RowMeans, SpannedRows, add_row_sums_
from opt_kernels.hooks.sums import subtract_row_means_

CUTS = [(0, 35), (0, 7, 35), (0, 3, 5, 35), (0, 10, 11, 11, 24, 35), (0, 6, 8, 34, 35), tuple(range(36))]


def centered(grad: Tensor, rows: SpannedRows, cuts: tuple[int, ...], scale: float) -> Tensor:
    """`grad` scaled, without the means of its rows, run by run."""
    sums = torch.zeros(rows.num, dtype=torch.float64)
    runs = [(begin, grad.flatten()[begin:end]) for begin, end in pairwise(cuts)]
    for first, run in runs:
        add_row_sums_(sums, run, rows, first=first)
    found = []
    for first, run in runs:
        found.append(scale * run)
        subtract_row_means_(found[-1], RowMeans(sums / rows.whole_numel, rows, first), scale=scale)
    return torch.cat(found).view(grad.shape)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_flat_runs_lose_the_means_of_whole_rows(cuts: tuple[int, ...]) -> None:
    grad = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    got = centered(grad, SpannedRows(num=5, dims=1, local_numel=7, whole_numel=7), cuts, scale=0.25)
    torch.testing.assert_close(got, 0.25 * (grad - grad.mean(1, keepdim=True)), rtol=0.0, atol=1e-15)


@pytest.mark.parametrize("dims", [1, 2])
def test_blocks_of_columns_lose_the_means_of_whole_rows(dims: int) -> None:
    """Strided blocks, one of them without columns; rows are numbered by one dim, or of a stack of matrices by two."""
    grad = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    blocks = torch.split(grad, [4, 0, 2], dim=2)
    sums = torch.zeros(grad.shape[:dims].numel(), dtype=torch.float64)
    whole = grad.shape[dims:].numel()
    rows = [SpannedRows(sums.numel(), dims, block.shape[dims:].numel(), whole) for block in blocks]
    for block, of in zip(blocks, rows):
        add_row_sums_(sums, block, of, first=0)
    got = [block.clone() for block in blocks]
    for block, of in zip(got, rows):
        subtract_row_means_(block, RowMeans(sums / whole, of, 0), scale=1.0)
    want = grad - grad.mean(tuple(range(dims, 3)), keepdim=True)
    torch.testing.assert_close(torch.cat(got, 2), want, rtol=0.0, atol=1e-15)


def test_sums_of_narrow_gradients_do_not_overflow() -> None:
    grad = torch.full((2, 4096), 60_000.0, dtype=torch.float16)
    sums = torch.zeros(2, dtype=torch.float64)
    add_row_sums_(sums, grad.view(-1), SpannedRows(2, 1, 4096, 4096), first=0)
    assert sums.tolist() == [4096 * 60_000.0] * 2
