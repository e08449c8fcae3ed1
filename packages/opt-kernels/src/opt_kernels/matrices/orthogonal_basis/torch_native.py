"""Orthogonal bases from batched matrix products and Cholesky factors, which are faster than reflections."""

import torch
from torch import Tensor

from opt_kernels.matrices.orthogonal_basis import reference
from opt_kernels.matrices.orthogonal_basis.reference import Eigenbasis
from opt_kernels.matrices.syrk.torch_native import symmetric_product

# The columns must be orthogonal to within this after the first pass, so that the second makes them orthogonal up to
# rounding: it squares the error, and multiplies it by the rounding unit. Otherwise Householder reflections are used.
WELL_CONDITIONED = 0.1


def eigenbasis(matrix: Tensor) -> Eigenbasis:
    """Same as `reference.eigenbasis`, in float64 for matrices on which float32 does not converge."""
    try:
        return reference.eigenbasis(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, but not in its __all__
        values, vectors = reference.eigenbasis(matrix.double())
        return Eigenbasis(values.to(matrix.dtype), vectors.to(matrix.dtype))


def orthonormalised(columns: Tensor) -> Tensor:
    """The Q of columns = QR, (batch, n, n), with a positive diagonal of R, by checked CholeskyQR2.

    Yamamoto et al. 2015. A pass is X <- X L⁻ᵀ where LLᵀ = XᵀX. Columns are first scaled to unit length, which is nearly
    the best conditioning that scaling columns can achieve. X is K Q for a Q that nearly diagonalises K, so after
    scaling it is well conditioned for any condition number of K. Other matrices use `reference.orthonormalised`; the
    host reads one flag to detect them.
    """
    x = columns / torch.linalg.vector_norm(columns, dim=-2, keepdim=True)
    x, first_failed = _pass(x)
    gram = symmetric_product(x.mT, x)
    deviation = (gram - torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)).abs().amax((-2, -1))
    x, second_failed = _pass(x, gram)
    bad = first_failed | second_failed | ~(deviation < WELL_CONDITIONED)  # written so that NaN is bad
    if bool(bad.any()):
        x[bad] = reference.orthonormalised(columns[bad])
    return x


def _pass(x: Tensor, gram: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """X L⁻ᵀ, and for each matrix of the batch whether its Cholesky factorisation failed."""
    factor, info = torch.linalg.cholesky_ex(symmetric_product(x.mT, x) if gram is None else gram)
    return torch.linalg.solve_triangular(factor.mT, x, upper=True, left=False), info != 0
