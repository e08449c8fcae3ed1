"""Products of matrices that are known to be symmetric: half of the result is computed, the other half is mirrored.

Here with torch's matrix products; `cpp` and `triton` have further versions, which `dispatch` chooses by device.
"""

import torch
from torch import Tensor

from opt_kernels.precision import multiplies_bfloat16

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
    if _is_slow(left) or not halving_pays(left):
        return dense_product(left, right, alpha=alpha, added=added, beta=beta)
    batch, m, _ = left.shape
    out = left.new_empty(batch, m, m)
    size = m // BLOCK_ROWS
    for i in range(batch):
        for low in range(0, m, size):
            high = low + size
            rows = left[i, low:high]
            cols = right[i, :, :high]
            block = out[i, low:high, :high]
            if added is not None:
                added_block = added[i, low:high, :high]
                torch.addmm(added_block, rows, cols, beta=beta, alpha=alpha, out=block)
            else:
                torch.mm(rows, cols, out=block)
                if alpha != 1.0:
                    block.mul_(alpha)
            mirrored = block[:, :low].mT
            out[i, :low, low:high] = mirrored
    return out


def dense_product(
    left: Tensor,
    right: Tensor,
    *,
    alpha: float = 1.0,
    added: Tensor | None = None,
    beta: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """The same product with every element computed; also correct if it is not symmetric. Into `out`, if given."""
    if _is_slow(left):
        return _rounded_product(left, right, alpha=alpha, added=added, beta=beta, out=out)
    if added is None:
        product = torch.bmm(left, right, out=out)
        return product if alpha == 1.0 else product.mul_(alpha)
    return torch.baddbmm(added, left, right, beta=beta, alpha=alpha, out=out)


def _rounded_product(
    left: Tensor, right: Tensor, *, alpha: float, added: Tensor | None, beta: float, out: Tensor | None
) -> Tensor:
    """`dense_product` in float32, in which products of bfloat16 numbers are exact, rounded. One matrix at a time."""
    if out is None:
        out = left.new_empty(left.shape[0], left.shape[1], right.shape[2])
    for i in range(len(left)):
        product = left[i].float() @ right[i].float()
        if alpha != 1.0:
            product *= alpha
        if added is not None:
            product.add_(added[i], alpha=beta)
        out[i] = product
    return out


def _is_slow(left: Tensor) -> bool:
    """Whether torch multiplies matrices of this dtype and device up to 36 times as slowly as in float32."""
    return left.dtype is torch.bfloat16 and left.is_cpu and not multiplies_bfloat16()


def halving_pays(left: Tensor) -> bool:
    """Whether half a product is faster than a whole one for `left` (batch, m, k), by a table of measured crossovers."""
    m, k = left.shape[-2:]
    if left.device.type != "cpu":
        return False
    # Medians on two cores with AVX512. With bf16 instructions, the overhead of calls weighs four times as much.
    crossover = 1 << 28 if left.itemsize == 2 else 1 << 26
    return m * m * k >= crossover and m % BLOCK_ROWS == 0
