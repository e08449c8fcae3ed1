"""`Ready`: the pieces of a unit that a step updates, and their gradients."""

from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor

from opt_distributed.step.pieces import Kinds, OwnedPiece
from opt_kernels.works import Unchanged
from opt_paramgroups import ParamId

Grads = Sequence[Tensor | None]
"""The gradients of all pieces of a unit, None for a piece without one."""


_GRAD = attrgetter("grad")


class LiveGrads(Sequence[Any]):
    """The present gradients of parameters, read when they are used. Keeps no gradient alive."""

    __slots__ = ("_params",)

    def __init__(self, params: Sequence[Tensor]):
        self._params = params

    def __len__(self) -> int:
        return len(self._params)

    def __getitem__(self, index: Any) -> Any:
        return list(map(_GRAD, self._params[index])) if isinstance(index, slice) else self._params[index].grad

    def __iter__(self) -> Iterator[Any]:
        return map(_GRAD, self._params)

    def at(self, positions: Sequence[int]) -> "LiveGrads":
        """Those at these positions."""
        return LiveGrads([self._params[position] for position in positions])


class Ready(NamedTuple):
    """The pieces of a unit that have gradients, and these gradients, in the same order.

    Two lists instead of pairs: with thousands of small parameters, creating objects takes most of a step's time.
    """

    pieces: Sequence[OwnedPiece]
    grads: Sequence[Tensor]
    kinds: Kinds | None = None  # of the pieces, if they are known
    unchanged: Unchanged | None = None  # see `Steady`; None: tensors may have moved since the last step
    grads_at: tuple[int, ...] = ()  # with `unchanged`, the addresses of the gradients: the only ones that may change

    @property
    def stays(self) -> bool:
        """Whether the next step has the same object if nothing has moved. What follows from it may then be kept."""
        return self.unchanged is not None and isinstance(self.grads, LiveGrads)

    def unproved(self) -> "Ready":
        """The same without `unchanged`, for use after other code has run."""
        return self._replace(unchanged=None, grads_at=())

    def without(self, unused: Collection[ParamId]) -> "Ready":
        """Drop the pieces of these parameters."""
        kept = [(p, g) for p, g in zip(self.pieces, self.grads, strict=True) if p.id not in unused]
        return Ready([p for p, _ in kept], [g for _, g in kept])
