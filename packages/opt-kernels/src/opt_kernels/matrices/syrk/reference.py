"""A symmetric product by its formula, with every element computed."""

from torch import Tensor


def symmetric_product(
    left: Tensor,  # (batch, m, k)
    right: Tensor,  # (batch, k, m); left @ right must be symmetric, as for left.mT or a matrix that commutes with left
    *,
    alpha: float = 1.0,
    added: Tensor | None = None,  # (batch, m, m), symmetric
    beta: float = 0.0,
) -> Tensor:
    """alpha · left right + beta · added, a new tensor (batch, m, m) of left's dtype."""
    product = alpha * (left @ right)
    return product if added is None else product + beta * added
