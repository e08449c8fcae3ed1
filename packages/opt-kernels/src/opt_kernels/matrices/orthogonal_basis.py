"""Orthogonal bases: the eigenvectors of a symmetric matrix, computed once and then tracked while the matrix changes."""

from typing import NamedTuple

import torch
from torch import Tensor

from opt_kernels.matrices.syrk import symmetric_product

# The columns must be orthogonal to within this after the first pass, so that the second makes them orthogonal up to
# rounding: it squares the error, and multiplies it by the rounding unit. Otherwise Householder reflections are used.
WELL_CONDITIONED = 0.1


class Eigenbasis(NamedTuple):
    """Eigenvalues in descending order, and their orthonormal eigenvectors."""

    values: Tensor  # (batch, n)
    vectors: Tensor  # (batch, n, n), columns


def eigenbasis(matrix: Tensor) -> Eigenbasis:
    """The eigenvalues and eigenvectors of symmetric matrices (batch, n, n), float32 or float64.

    Those on which float32 does not converge are computed in float64.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, but not in its __all__
        values, vectors = (x.to(matrix.dtype) for x in torch.linalg.eigh(matrix.double()))
    return Eigenbasis(values.flip(-1), vectors.flip(-1))


def householder(columns: Tensor) -> Tensor:
    """The Q of columns = QR, (batch, n, n), by Householder reflections, with the signs that make the diagonal of R
    positive, which makes it unique if `columns` has full rank."""
    q, r = torch.linalg.qr(columns)
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    ones = torch.ones_like(diagonal)
    signs = torch.where(diagonal < 0, -ones, ones)
    return torch.mul(q, signs.unsqueeze(-2))


def cholesky(columns: Tensor) -> Tensor:
    """The Q of columns = QR, (batch, n, n), with a positive diagonal of R, by checked CholeskyQR2.

    Yamamoto et al. 2015. A pass is X <- X L⁻ᵀ where LLᵀ = XᵀX. Columns are first scaled to unit length, which is nearly
    the best conditioning that scaling columns can achieve. X is K Q for a Q that nearly diagonalises K, so after
    scaling it is well conditioned for any condition number of K. Other matrices use `householder`; the
    host reads one flag to detect them.
    """
    x = columns / torch.linalg.vector_norm(columns, dim=-2, keepdim=True)
    x, first_failed = _pass(x, symmetric_product(x.mT, x))
    gram = symmetric_product(x.mT, x)
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    deviation = (gram - identity).abs().amax((-2, -1))
    x, second_failed = _pass(x, gram)
    bad = first_failed | second_failed | ~(deviation < WELL_CONDITIONED)  # written so that NaN is bad
    if bool(bad.any()):
        x[bad] = householder(columns[bad])
    return x


def _pass(x: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """X L⁻ᵀ for the Gram matrix LLᵀ, and for each matrix of the batch whether its Cholesky factorisation failed."""
    factor, info = torch.linalg.cholesky_ex(gram)
    solved = torch.linalg.solve_triangular(factor.mT, x, upper=True, left=False)
    return solved, info != 0
