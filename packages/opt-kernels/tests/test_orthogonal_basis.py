"""Orthogonal bases: CholeskyQR2 against Householder QR in float64, where it works and where it must give way."""

import pytest
import torch
from torch import Tensor

from opt_kernels.matrices.orthogonal_basis import cholesky, eigenbasis, householder

SIZES = [1, 2, 17, 64, 200]


def tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def identity_error(q: Tensor) -> float:
    return float((q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype)).abs().max())


@pytest.mark.parametrize("n", SIZES)
def test_an_eigenbasis_diagonalises_largest_first(n: int) -> None:
    x = tensor(3, n, n + 5)
    values, vectors = eigenbasis(x @ x.mT)
    torch.testing.assert_close((vectors * values.unsqueeze(-2)) @ vectors.mT, x @ x.mT, rtol=0, atol=1e-9)
    assert bool((values.diff(dim=-1) <= 0).all())


@pytest.mark.parametrize("n", SIZES)
def test_the_q_of_the_reference_belongs_to_an_r_with_a_positive_diagonal(n: int) -> None:
    columns = tensor(2, n, n)
    q = householder(columns)
    r = q.mT @ columns
    assert identity_error(q) < 1e-12
    torch.testing.assert_close(r.triu(), r, rtol=0, atol=1e-10)
    assert bool((r.diagonal(dim1=-2, dim2=-1) > 0).all())


def followed(n: int, condition: float) -> Tensor:
    """K Q, K of that condition and Q close to its eigenvectors: what a basis is followed with. (1, n, n) float64."""
    exact = householder(tensor(1, n, n))
    k = (exact * torch.logspace(0, -torch.tensor(condition).log10().item(), n, dtype=torch.float64)) @ exact.mT
    nearly = householder(exact + 1e-3 / condition**0.5 * tensor(1, n, n, seed=1))
    return torch.matmul(k, nearly)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("condition", [1e1, 1e4, 1e12])
def test_choleskys_basis_is_householders_whatever_the_condition_of_what_it_follows(n: int, condition: float) -> None:
    columns = followed(n, condition)
    expected = householder(columns)
    got = cholesky(columns.float()).double()
    assert identity_error(got) < 1e-5
    # Columns rounded to fp32 differ by 6e-8 of their length; orthogonalising multiplies that by their condition.
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


HARD = {
    "zero": torch.zeros(9, 9, dtype=torch.float64),
    "rank_one": torch.ones(9, 9, dtype=torch.float64),
    "zero_column": tensor(9, 9).index_fill(1, torch.tensor([4]), 0.0),
    "nearly_parallel": torch.ones(9, 9, dtype=torch.float64) + 1e-6 * tensor(9, 9),
}


@pytest.mark.parametrize("kind", HARD)
def test_columns_that_are_nearly_dependent_are_left_to_householder(kind: str) -> None:
    easy = tensor(9, 9, seed=3)
    got = cholesky(torch.stack([easy, HARD[kind]]).float())
    assert identity_error(got) < 1e-5
    torch.testing.assert_close(got[0].double(), householder(easy), rtol=0, atol=1e-4)
