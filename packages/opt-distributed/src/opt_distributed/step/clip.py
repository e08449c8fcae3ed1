"""The clip coefficient, by which all gradients of a norm slot are multiplied, and other factors."""

import torch
from torch import Tensor


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return `min(max_norm / (norm + 1e-6), 1)`; 1 if `max_norm` is 0, which turns clipping off.

    Megatron-Core and `torch.nn.utils.clip_grad_norm_` add the same 1e-6. For an infinite or NaN norm the result is
    meaningless: a step with such a norm updates nothing.
    """
    return min(max_norm / (norm + 1e-6), 1.0) if max_norm > 0 else 1.0


def times(numbers: Tensor, factor: float | Tensor) -> Tensor:
    """`numbers * factor`; without an operation on the device if the host knows that it would change nothing."""
    return numbers if isinstance(factor, float) and factor == 1.0 else numbers * factor


def clip_coefficients(norms: Tensor, max_norm: float) -> Tensor:
    """`clip_coefficient` of each of `norms` (n,), on their device."""
    if max_norm <= 0:
        return torch.ones_like(norms)
    # Tensor / tensor: torch computes `max_norm / norms` as a product with the rounded reciprocal.
    return torch.full_like(norms, max_norm).div_(norms + 1e-6).clamp_(max=1.0)
