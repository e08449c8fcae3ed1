"""`Ready`: the pieces of a unit that a step updates, and their gradients."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from opt_distributed.step.pieces import Kinds, OwnedPiece
from opt_paramgroups import ParamId

Grads = Sequence[Tensor | None]
"""The gradients of all pieces of a unit, None for a piece without one."""


class Ready(NamedTuple):
    """The pieces of a unit that have gradients, and these gradients, in the same order.

    Two lists instead of pairs: with thousands of small parameters, creating objects takes most of a step's time.
    """

    pieces: Sequence[OwnedPiece]
    grads: Sequence[Tensor]
    kinds: Kinds | None = None  # of the pieces, if they are known

    def without(self, unused: Collection[ParamId]) -> "Ready":
        """Drop the pieces of these parameters."""
        kept = [(p, g) for p, g in zip(self.pieces, self.grads, strict=True) if p.id not in unused]
        return Ready([p for p, _ in kept], [g for _, g in kept])
