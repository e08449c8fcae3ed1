"""`Steady`: whether any tensor has moved since the last step, proved once for everything that a step keeps.

A step keeps the sweeps of its statistics, the works of its rules, and the finding that no parameter has left its
memory. All of it holds while every gradient, parameter and written tensor has its address and its layout. The proof
is one call of compiled code. Main values and states take part once other code has had access to them.
Everything else is proved by parts (`KeptWorks`, `Source.moved`).
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

from torch import Tensor

from opt_distributed.buffers.binding import SparseGradientError
from opt_distributed.step.ready import LiveGrads, Ready
from opt_distributed.step.sources import ReadWhole
from opt_distributed.step.stats import Family, moved_parameter
from opt_distributed.step.unit import Unit
from opt_kernels.backends.kept.objects import Entries
from opt_kernels.backends.kept.snapshot import CHANGED, MOVED, Snapshot, are_plain
from opt_kernels.works import Unchanged
from opt_paramgroups import ParamId


class Present(NamedTuple):
    """What a step finds before it computes anything."""

    ready: list[Ready]  # one for each unit
    moved: ParamId | None = None  # a parameter that has left the memory that updates write to
    sparse: SparseGradientError | None = None  # for gradients that were left out


class Steady:
    """Reads the gradients of each step, and checks where all tensors are."""

    def __init__(self, units: Sequence[Unit], families: Sequence[Family]):
        self._units, self._families = units, families
        self._owners = _owners(units)
        self._live = [LiveGrads(of_unit) for of_unit in self._owners or ()]
        self._unowned = _without(
            _joined(self._owners or ()),
            chain(
                (piece.own_main.target for unit in units for piece in unit.pieces),
                (p for family in families for source in family.sources for p in source.params.values()),
            ),
        )
        self._snapshot: Snapshot | None = None  # None: nothing is kept
        self._first: list[Tensor] = []  # all owners in it
        self._others: list[Tensor] = []  # all other tensors in it except gradients
        self._touched: list[bool] = []  # for each unit, whether its main values and states are among these
        self._states: list[dict[str, Tensor]] = []  # of these units
        self._entries = Entries([])  # of these states
        self._unchanged = Unchanged()
        self._grads_at: list[tuple[int, ...]] = []  # addresses by unit, if the snapshot holds
        self._present: Present | None = None  # what the last step found, if it holds no gradients

    def forget(self) -> None:
        """Keep nothing of the last step."""
        self._snapshot = self._present = None

    def look(self) -> Present:
        """Read the gradients. What was kept of them is valid if `Ready.unchanged` is the same object again.

        If gradients have not moved either, each `Ready` is the same object again where `Ready.stays`.
        """
        if self._snapshot is not None:
            if (present := self._again(self._snapshot)) is not None:
                return present
            self.forget()
        ready = [unit.ready(unit.read_grads()) for unit in self._units]
        errors = [error for unit in self._units if (error := unit.take_error()) is not None]
        moved = moved_parameter(self._families)
        self._begin(ready, moved)
        return Present(ready, moved, errors[0] if errors else None)

    def _again(self, snapshot: Snapshot) -> Present | None:
        """What this step finds if nothing except gradients has moved; None otherwise."""
        if not self._are_others_known():
            return None
        found: Sequence[Any] = self._live if self._owners is not None else [unit.read_grads() for unit in self._units]
        first = self._first if self._owners is not None else _joined(found)
        change = snapshot.compared(first, self._others)
        if change == CHANGED:
            return None
        if change == MOVED:
            self._grads_at, self._present = _parted(snapshot.grads_at, found), None
        if self._present is not None:
            return self._present
        of_units = zip(self._units, found, self._grads_at, strict=True)
        present = Present([unit.steady_ready(grads, self._unchanged, at) for unit, grads, at in of_units])
        if self._owners is not None:
            self._present = present
        return present

    def _are_others_known(self) -> bool:
        """Whether other code has had access to the same units as before, and has replaced none of their states."""
        if [unit.states_may_change for unit in self._units] != self._touched:
            return False
        return not self._states or self._entries.same(self._states)

    def _begin(self, ready: Sequence[Ready], moved: ParamId | None) -> None:
        """Keep what this step found from the next one on, if every piece has a gradient and nothing else may move."""
        grads, owners = [of_unit.grads for of_unit in ready], _joined(self._owners or ())
        is_possible = (
            moved is None
            and len(owners) + len(self._unowned) > 0
            and all(of_unit.pieces is unit.pieces for unit, of_unit in zip(self._units, ready, strict=True))
            and all(unit.is_launched for unit in self._units)
            and all(type(state) is dict for unit in self._units for state in unit.states)
        )
        if not is_possible:
            return
        self._find_others()
        if not are_plain([*_joined(grads), *owners, *self._others]):
            return
        self._first = owners
        self._snapshot = Snapshot(owners or _joined(grads), self._others, reads_grads=self._owners is not None)
        self._grads_at = _parted(self._snapshot.grads_at, grads)
        self._unchanged, self._present = Unchanged(), None

    def _find_others(self) -> None:
        """Find the tensors except gradients that may move: main values and states, too, once others had access."""
        self._touched = [unit.states_may_change for unit in self._units]
        touched = [unit for unit in self._units if unit.states_may_change]
        self._states = [state for unit in touched for state in unit.states]
        self._entries = Entries(self._states)
        mains = (tensor for unit in touched for piece in unit.pieces for tensor in piece.own_main.kept())
        self._others = [*self._unowned, *mains, *self._entries.values]


def _owners(units: Sequence[Unit]) -> list[list[Tensor]] | None:
    """The parameters of each unit, if their `grad` is all that it reads; None if some unit reads other tensors."""
    readers = [unit.read_grads for unit in units]
    owners = [reader.params for reader in readers if isinstance(reader, ReadWhole)]
    return owners if len(owners) == len(readers) else None


def _without(known: Iterable[Tensor], tensors: Iterable[Tensor]) -> list[Tensor]:
    """The different tensors among these that are not known."""
    found = {id(tensor): tensor for tensor in tensors}
    for tensor in known:
        found.pop(id(tensor), None)
    return list(found.values())


def _joined(found: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return list(chain.from_iterable(found))


def _parted(addresses: tuple[int, ...], found: Sequence[Sequence[Tensor]]) -> list[tuple[int, ...]]:
    ends = list(accumulate(map(len, found)))
    return [addresses[end - len(of_unit) : end] for end, of_unit in zip(ends, found, strict=True)]
