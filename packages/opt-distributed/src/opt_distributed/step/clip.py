"""The clip coefficient: what every gradient of a norm group is multiplied by."""

import math


def clip_coefficient(norm: float, max_norm: float) -> float:
    """`max_norm / (norm + 1e-6)` where that is below one, else one; `max_norm` 0 turns clipping off.

    The term 1e-6 is the reference's (and `torch.nn.utils.clip_grad_norm_`'s). A norm that is not finite has no
    coefficient: the step refuses it before it asks.
    """
    if not math.isfinite(norm):
        raise ValueError(f"norm is {norm}; a clip coefficient exists only for finite norms")
    if max_norm <= 0:
        return 1.0
    return min(max_norm / (norm + 1e-6), 1.0)
