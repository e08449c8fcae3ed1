"""Works that are kept between steps while their tensors do not change."""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import Tensor

from opt_kernels.optim.places import Places, are_plain
from opt_kernels.optim.rows import Member, Row
from opt_kernels.works import Standing, Works


class KeptWorks:
    """Cache of the works of all rows. Checking that they are still valid takes a few passes in C over all tensors.
    Creating them again, and looking up the tables of sweeps, takes several times as long."""

    def __init__(self, rows: Sequence[Row], members: Sequence[Member]) -> None:
        self._rows = rows
        self._params = [member.param for member in members]
        self._states = [member.state for member in members]
        self._present = _picker([member.place for member in members])
        self._of_rows = [_picker(row.places) for row in rows]
        number = {member.place: index for index, member in enumerate(members)}
        self._addresses_of_rows = [_picker([number[place] for place in row.places]) for row in rows]
        self._are_possible = (
            bool(rows)
            and all(row.is_launched and row.spans is None for row in rows)
            and are_plain(self._params)
            and all(type(state) is dict for state in self._states)
        )
        self._places: Places | None = None  # None: nothing is kept
        self._with_states = False  # whether the places of states are among them
        self._names: list[str] = []  # of these states
        self._columns: list[Works] = []
        self._standings: list[Standing] = []

    def hold(self, grads: Sequence[Tensor | None], *, states_may_change: bool) -> bool:
        """Whether works are kept and still valid. `grads` are those of all parameters."""
        if self._places is None:
            return False
        others = self._others(states_may_change)
        is_held = (
            self._with_states == states_may_change
            and self._names_of(states_may_change) == self._names
            and self._places.hold(self._present(grads), others)
        )
        if not is_held:
            self._places = None
            return False
        return True

    def begin(self, grads: Sequence[Tensor | None], *, states_may_change: bool) -> None:
        """Keep the works from now on, if possible."""
        if not self._are_possible:
            return
        others, present = self._others(states_may_change), self._present(grads)
        if not are_plain([*present, *others]):
            return
        self._places = Places(present, others)
        self._with_states, self._names = states_may_change, self._names_of(states_may_change)
        self._columns = [row.columns(row.params) for row in self._rows]
        self._standings = [Standing() for _ in self._rows]

    def works(self, grads: Sequence[Tensor | None]) -> list[Works] | None:
        """The works of each row; None if nothing is kept."""
        if self._places is None:
            return None
        grads_at = self._places.grads_at
        return [
            columns.with_grads(of_row(grads), standing=standing, grads_at=tuple(addresses(grads_at)))
            for columns, standing, of_row, addresses in zip(
                self._columns, self._standings, self._of_rows, self._addresses_of_rows
            )
        ]

    def _others(self, with_states: bool) -> list[Tensor]:
        if not with_states:
            return self._params
        return [*self._params, *chain.from_iterable(map(dict.values, self._states))]

    def _names_of(self, with_states: bool) -> list[str]:
        return list(chain.from_iterable(self._states)) if with_states else []


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that returns the entries of a sequence at these indices. If they are all indices in order, it returns
    the sequence itself."""
    if len(places) == 1:
        return lambda entries: (entries[places[0]],)
    pick = itemgetter(*places) if places else lambda entries: ()
    in_order = list(places) == list(range(len(places)))
    return lambda entries: entries if in_order and len(entries) == len(places) else pick(entries)
