"""`Limits`: when gradients are clipped, and when a step is refused."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits on the gradient norms of a step."""

    slots: tuple[str, ...] = ("",)  # names of the gradient norms; the first, "", is the model's own
    clips: tuple[bool, ...] = (True,)  # for each slot, whether its gradients are clipped to `max_norm`
    max_norm: float = 1.0  # of each clipped slot; 0 turns clipping off
    skip_above: float = math.inf  # a larger norm of slot "" refuses the step
    count_zeros: bool = False
