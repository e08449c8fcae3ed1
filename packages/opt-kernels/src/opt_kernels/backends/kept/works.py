"""Works that are kept between steps while their tensors do not change: by the drop-in optimizers and by the stack."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.backends.kept.snapshot import Snapshot, are_plain
from opt_kernels.works import Unchanged, Works

_VALUES: Callable[[Any], Iterable[Tensor]] = dict.values


class KeptWorks:
    """Cache of the works of parameters that are updated together. Checking that they are still valid takes a few passes
    in C over all tensors. Creating them again, and looking up the tables of sweeps, takes several times as long."""

    def __init__(
        self,
        columns: Callable[[], Works],  # all columns except the gradients, as they are now
        *,
        positions: Sequence[int],  # of the gradients, among those given in each step
        params: Sequence[Tensor],  # what other code may move at any time
        states: Sequence[Mapping[str, Tensor]],  # what it may move or replace once it had access
        mains: Sequence[Tensor] = (),  # likewise, where they are not among the states
        is_possible: bool,  # False: nothing is ever kept
    ) -> None:
        self._make_columns = columns
        self.pick = picker(positions)  # the entries of these works, of a sequence with those of all
        self._params, self._states, self._mains = params, states, mains
        self._is_possible = (
            is_possible and len(positions) > 0 and are_plain(params) and all(type(state) is dict for state in states)
        )
        self._snapshot: Snapshot | None = None  # None: nothing is kept
        self._with_states = False  # whether the positions of states and mains are among them
        self._names: list[str] = []  # of these states
        self._columns: Works | None = None
        self._unchanged = Unchanged()

    def hold(self, grads: Sequence[Tensor | None], *, states_may_change: bool) -> bool:
        """Whether works are kept and still valid. `grads` are those of all parameters."""
        if self._snapshot is None:
            return False
        is_held = (
            self._with_states == states_may_change
            and self._names_of(states_may_change) == self._names
            and self._snapshot.holds(list(self.pick(grads)), self._others(states_may_change))
        )
        if not is_held:
            self._snapshot = None
        return is_held

    def begin(self, grads: Sequence[Tensor | None], *, states_may_change: bool) -> None:
        """Keep the works from now on, if possible."""
        self._snapshot = None
        if not self._is_possible:
            return
        others, present = self._others(states_may_change), self.pick(grads)
        if not are_plain([*present, *others]):
            return
        self._snapshot = Snapshot(present, others)
        self._with_states, self._names = states_may_change, self._names_of(states_may_change)
        self._columns = self._make_columns()
        self._unchanged = Unchanged()

    def works(self, grads: Sequence[Tensor | None]) -> Works | None:
        """The works with these gradients; None if nothing is kept."""
        if self._snapshot is None or self._columns is None:
            return None
        return self._columns.with_grads(self.pick(grads), unchanged=self._unchanged, grads_at=self._snapshot.grads_at)

    def proved(self, grads: Sequence[Tensor], grads_at: tuple[int, ...], *, stays: bool) -> Works:
        """`works`, with these gradients, which `pick` has picked. The caller has proved that nothing else has moved
        since then. `stays` is described in `Works`."""
        assert self._columns is not None
        return self._columns.with_grads(grads, unchanged=self._unchanged, grads_at=grads_at, stays=stays)

    def _others(self, with_states: bool) -> list[Tensor]:
        if not with_states:
            return list(self._params)
        return [*self._params, *self._mains, *chain.from_iterable(map(_VALUES, self._states))]

    def _names_of(self, with_states: bool) -> list[str]:
        return list(chain.from_iterable(self._states)) if with_states else []


def is_launched(rule: object, device: torch.device) -> bool:
    """Whether `rule` updates tensors on `device` by sweeps that read addresses from a table, which can be kept."""
    backend = getattr(rule, "backend", None)
    if device.type == "cpu" and backend in (None, "cpp"):
        return hasattr(rule, "formula") and usable()
    return device.type == "cuda" or backend == "triton"


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that returns the entries of a sequence at these indices. If they are all indices in order, it returns
    the sequence itself."""
    if len(positions) == 1:
        return lambda entries: (entries[positions[0]],)
    pick = itemgetter(*positions) if positions else lambda entries: ()
    in_order = list(positions) == list(range(len(positions)))
    return lambda entries: entries if in_order and len(entries) == len(positions) else pick(entries)
