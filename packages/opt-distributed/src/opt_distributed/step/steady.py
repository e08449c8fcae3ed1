"""`Steady`: whether any tensor has moved since the last step, proved once for everything that a step keeps.

A step keeps the sweeps of its statistics, the works of its rules, and the finding that no parameter has left its
memory. All of it holds while every gradient, parameter and written tensor has its address and its layout. The proof
takes a few passes in C over all tensors. Main values and states take part once other code has had access to them.
Everything else is proved by parts (`KeptWorks`, `Source.moved`).
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

from torch import Tensor

from opt_distributed.step.ready import Ready
from opt_distributed.step.stats import Family, moved_parameter
from opt_distributed.step.unit import Unit
from opt_kernels.backends.triton.snapshot import Snapshot, are_plain
from opt_kernels.works import Unchanged
from opt_paramgroups import ParamId

Names = list[str] | None
"""The names of all states of a unit, in order; None if no other code has had access to them."""

_VALUES: Callable[[Any], Iterable[Tensor]] = dict.values


class Present(NamedTuple):
    """What a step finds before it computes anything."""

    ready: list[Ready]  # one for each unit
    moved: ParamId | None  # a parameter that has left the memory that updates write to


class Steady:
    """Reads the gradients of each step, and checks where all tensors are."""

    def __init__(self, units: Sequence[Unit], families: Sequence[Family]):
        self._units, self._families = units, families
        self._others = list(
            {
                id(tensor): tensor
                for tensor in chain(
                    (piece.own_main.target for unit in units for piece in unit.pieces),
                    (p for family in families for source in family.sources for p in source.params.values()),
                )
            }.values()
        )
        self._states = [unit.states for unit in units]
        self._mains = [tensor for unit in units for piece in unit.pieces for tensor in piece.own_main.kept()]
        self._snapshot: Snapshot | None = None  # None: nothing is kept
        self._names: list[Names] = []  # of the states in it
        self._unchanged = Unchanged()
        self._grads_at: list[tuple[int, ...]] = []  # addresses by unit, if the snapshot holds

    def forget(self) -> None:
        """Keep nothing of the last step."""
        self._snapshot = None

    def look(self) -> Present:
        """Read the gradients. What was kept of them is valid if `Ready.unchanged` is the same object again."""
        found: list[Any] = [unit.read_grads() for unit in self._units]  # without None where the snapshot holds
        if self._snapshot is not None and not self._holds(self._snapshot, found):
            self._snapshot = None
        if self._snapshot is None:
            ready = [unit.ready(grads) for unit, grads in zip(self._units, found, strict=True)]
            moved = moved_parameter(self._families)
            self._begin(ready, moved)
            return Present(ready, moved)
        pairs = zip(self._units, found, self._grads_at, strict=True)
        return Present([unit.steady_ready(grads, self._unchanged, at) for unit, grads, at in pairs], None)

    def _holds(self, snapshot: Snapshot, found: Sequence[Sequence[Tensor]]) -> bool:
        before, names = snapshot.grads_at, self._names_of_states()
        if names != self._names or not snapshot.holds(_joined(found), self._others_with(names)):
            return False
        if snapshot.grads_at is not before:
            self._grads_at = _parted(snapshot.grads_at, found)
        return True

    def _begin(self, ready: Sequence[Ready], moved: ParamId | None) -> None:
        """Keep what this step found from the next one on, if every piece has a gradient and nothing else may move."""
        is_possible = (
            moved is None
            and len(self._others) > 0
            and all(type(state) is dict for states in self._states for state in states)
            and all(unit.is_launched for unit in self._units)
            and all(of_unit.pieces is unit.pieces for unit, of_unit in zip(self._units, ready, strict=True))
        )
        if not is_possible:
            return
        names = self._names_of_states()
        grads, others = [of_unit.grads for of_unit in ready], self._others_with(names)
        if not are_plain([*_joined(grads), *others]):
            return
        self._snapshot, self._names = Snapshot(_joined(grads), others), names
        self._grads_at = _parted(self._snapshot.grads_at, grads)
        self._unchanged = Unchanged()

    def _names_of_states(self) -> list[Names]:
        return [
            list(chain.from_iterable(states)) if unit.states_may_change else None
            for unit, states in zip(self._units, self._states, strict=True)
        ]

    def _others_with(self, names: Sequence[Names]) -> list[Tensor]:
        """All tensors except gradients that may have moved, with the mains if any states may."""
        if all(known is None for known in names):
            return self._others
        states = chain.from_iterable(s for s, known in zip(self._states, names, strict=True) if known is not None)
        return [*self._others, *self._mains, *chain.from_iterable(map(_VALUES, states))]


def _joined(found: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return list(chain.from_iterable(found))


def _parted(addresses: tuple[int, ...], found: Sequence[Sequence[Tensor]]) -> list[tuple[int, ...]]:
    ends = list(accumulate(map(len, found)))
    return [addresses[end - len(of_unit) : end] for end, of_unit in zip(ends, found, strict=True)]
