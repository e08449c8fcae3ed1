"""Symmetric products from torch's matrix products: blocks up to the diagonal are computed, the others mirrored."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_ROWS = 4  # rows of blocks: 10/16 of the work; eight would save 1/16 more and lose it again in calls


def symmetric_product(
    left: Tensor,  # (batch, m, k)
    right: Tensor,  # (batch, k, m); left @ right must be symmetric, as for left.mT or a matrix that commutes with left
    *,
    alpha: float = 1.0,
    added: Tensor | None = None,  # (batch, m, m), symmetric
    beta: float = 0.0,
) -> Tensor:
    """alpha · left right + beta · added, a new tensor (batch, m, m) of left's dtype.

    On a CPU, only blocks up to the diagonal are computed if the matrices are large enough for this to be faster.
    """
    if not halving_pays(left):
        return dense_product(left, right, alpha=alpha, added=added, beta=beta)
    out = left.new_empty(*left.shape[:-1], left.shape[-2])
    for i in range(left.shape[0]):
        _halved_(out[i], _Product(left[i], right[i], alpha, None if added is None else added[i], beta))
    return out


def dense_product(
    left: Tensor,  # (batch, m, k)
    right: Tensor,  # (batch, k, m)
    *,
    alpha: float = 1.0,
    added: Tensor | None = None,  # (batch, m, m)
    beta: float = 0.0,
) -> Tensor:
    """The same product with every element computed; also correct if it is not symmetric."""
    if added is None:
        product = torch.bmm(left, right)
        return product if alpha == 1.0 else product.mul_(alpha)
    return torch.baddbmm(added, left, right, beta=beta, alpha=alpha)


def halving_pays(left: Tensor) -> bool:
    """Whether half a product is faster than a whole one for `left` (batch, m, k), by a table of measured crossovers."""
    m, k = left.shape[-2:]
    if left.device.type != "cpu" or left.is_meta:
        return False
    # Medians on two cores with AVX512. With bf16 instructions, the overhead of calls weighs four times as much.
    crossover = 1 << 28 if left.itemsize == 2 else 1 << 26
    return m * m * k >= crossover and m % BLOCK_ROWS == 0


class _Product(NamedTuple):
    """The arguments of one symmetric product, for one matrix."""

    left: Tensor  # (m, k)
    right: Tensor  # (k, m)
    alpha: float
    added: Tensor | None  # (m, m)
    beta: float


def _halved_(out: Tensor, product: _Product) -> None:
    """Write `out` (m, m): each row of blocks up to the diagonal, and its mirror image above the diagonal."""
    size = out.shape[0] // BLOCK_ROWS
    for low in range(0, out.shape[0], size):
        high = low + size
        _block_row_(out[low:high, :high], product, low, high)
        out[:low, low:high] = out[low:high, :low].mT


def _block_row_(out: Tensor, product: _Product, low: int, high: int) -> None:
    left, right = product.left[low:high], product.right[:, :high]
    if product.added is not None:
        torch.addmm(product.added[low:high, :high], left, right, beta=product.beta, alpha=product.alpha, out=out)
        return
    torch.mm(left, right, out=out)
    if product.alpha != 1.0:
        out.mul_(product.alpha)
