"""Orthogonal bases from LAPACK's own decompositions: eigh, and QR by Householder reflections."""

from typing import NamedTuple

import torch
from torch import Tensor


class Eigenbasis(NamedTuple):
    """Eigenvalues, largest first, and the orthonormal eigenvectors that belong to them."""

    values: Tensor  # (batch, n)
    vectors: Tensor  # (batch, n, n), columns


def eigenbasis(matrix: Tensor) -> Eigenbasis:
    """The eigenvalues and eigenvectors of symmetric matrices (batch, n, n), float32 or float64."""
    values, vectors = torch.linalg.eigh(matrix)
    return Eigenbasis(values.flip(-1), vectors.flip(-1))


def orthonormalised(columns: Tensor) -> Tensor:
    """The Q of columns = QR, (batch, n, n), with the signs that make R's diagonal positive: it is unique where R is."""
    q, r = torch.linalg.qr(columns)
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    return torch.mul(q, torch.where(diagonal < 0, -1.0, 1.0).unsqueeze(-2))
