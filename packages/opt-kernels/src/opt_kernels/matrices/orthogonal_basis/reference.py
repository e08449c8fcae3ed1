"""Orthogonal bases from LAPACK's decompositions: eigh, and QR by Householder reflections."""

from typing import NamedTuple

import torch
from torch import Tensor


class Eigenbasis(NamedTuple):
    """Eigenvalues in descending order, and their orthonormal eigenvectors."""

    values: Tensor  # (batch, n)
    vectors: Tensor  # (batch, n, n), columns


def eigenbasis(matrix: Tensor) -> Eigenbasis:
    """The eigenvalues and eigenvectors of symmetric matrices (batch, n, n), float32 or float64."""
    values, vectors = torch.linalg.eigh(matrix)
    return Eigenbasis(values.flip(-1), vectors.flip(-1))


def orthonormalised(columns: Tensor) -> Tensor:
    """The Q of columns = QR, (batch, n, n), with the signs that make the diagonal of R positive, which makes it unique
    if `columns` has full rank."""
    q, r = torch.linalg.qr(columns)
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    return torch.mul(q, torch.where(diagonal < 0, -1.0, 1.0).unsqueeze(-2))
