"""Orthogonal bases by products and Cholesky factors, which run at the speed of matrix products and in batches."""

import torch
from torch import Tensor

from opt_kernels.matrices.orthogonal_basis import reference
from opt_kernels.matrices.orthogonal_basis.reference import Eigenbasis
from opt_kernels.matrices.syrk.torch_native import symmetric_product

# After the first pass the columns must be orthogonal to within this for the second to leave them so to rounding:
# the error is squared, and multiplied by the unit of rounding. Beyond it Householder reflections take over.
WELL_CONDITIONED = 0.1


def eigenbasis(matrix: Tensor) -> Eigenbasis:
    """What `reference.eigenbasis` says; where it does not converge in float32, in float64."""
    try:
        return reference.eigenbasis(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, but not in its __all__
        values, vectors = reference.eigenbasis(matrix.double())
        return Eigenbasis(values.to(matrix.dtype), vectors.to(matrix.dtype))


def orthonormalised(columns: Tensor) -> Tensor:
    """The Q of columns = QR, (batch, n, n), R's diagonal positive: column-normalised CholeskyQR2, checked.

    Yamamoto et al. 2015. A pass is X <- X L⁻ᵀ where LLᵀ = XᵀX. With columns of unit length X is as well conditioned as
    scaling columns can make it; what it leaves is K Q for a Q that nearly diagonalises K, which is well conditioned
    whatever the condition of K. Matrices for which that does not hold go to `reference.orthonormalised`; to know that,
    the host reads one flag.
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
    """X L⁻ᵀ, and for each matrix of the batch whether it could not be had."""
    factor, info = torch.linalg.cholesky_ex(symmetric_product(x.mT, x) if gram is None else gram)
    return torch.linalg.solve_triangular(factor.mT, x, upper=True, left=False), info != 0
