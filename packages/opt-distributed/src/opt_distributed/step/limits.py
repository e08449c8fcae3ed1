"""When gradients are scaled down, and when a step is refused."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a step holds its gradients' norms against."""

    slots: tuple[str, ...] = ("",)  # names of the gradient norms; the first, "", is the model's own
    clips: tuple[bool, ...] = (True,)  # for each slot whether its gradients are scaled down to `max_norm`
    max_norm: float = 1.0  # of each slot that is clipped; 0 leaves all gradients as they are
    skip_above: float = math.inf  # a larger norm of slot "" refuses the step
    count_zeros: bool = False
