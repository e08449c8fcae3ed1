"""The clip coefficient: what every gradient of a norm group is multiplied by."""

import torch
from torch import Tensor


def clip_coefficient(norm: float, max_norm: float) -> float:
    """`max_norm / (norm + 1e-6)` where that is below one, else one; `max_norm` 0 turns clipping off.

    The term 1e-6 is Megatron-Core's (and `torch.nn.utils.clip_grad_norm_`'s). Norms that are not finite have no
    coefficient: a step with such a norm updates nothing.
    """
    return min(max_norm / (norm + 1e-6), 1.0) if max_norm > 0 else 1.0


def clip_coefficients(norms: Tensor, max_norm: float) -> Tensor:
    """`clip_coefficient` of each of `norms` (n,), on their device."""
    if max_norm <= 0:
        return torch.ones_like(norms)
    # A division: `max_norm / norms` is a product with the rounded reciprocal in torch.
    return torch.full_like(norms, max_norm).div_(norms + 1e-6).clamp_(max=1.0)
