"""Which parameters move together: found once, and kept for as long as nothing about them changes.

A step over hundreds of parameters would otherwise spend more time on telling them apart than on launching what updates
them. A roster holds columns, one entry per parameter, and goes over whole columns at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels.dtensor import Span, is_dtensor, local
from opt_kernels.optim.mains import MAIN, REMAINDER
from opt_kernels.optim.state import STEP
from opt_kernels.rules.base import Rule
from opt_kernels.works import Batch, Hyper, MatrixSpec, Works

_GRAD = attrgetter("grad")


class Sweep(NamedTuple):
    """What one call of a rule can take."""

    rule: Rule
    device: torch.device


class Member(NamedTuple):
    """What is known of one parameter that has a gradient."""

    place: int  # among all parameters
    group: int
    param: Tensor
    state: dict[str, Tensor]
    rule: Rule
    matrix: MatrixSpec
    first: int  # number of its first element among all
    spans: tuple[Span, ...]  # of the elements that are here, numbered within the parameter


class Steps:
    """The `step` states of parameters that move together, as elements of one tensor: one addition counts for all."""

    def __init__(self, step: float, count: int, device: torch.device | None) -> None:
        # float32 as in torch.optim; on the host unless a device is given
        self._all = torch.full((count,), step, device=device)
        self._is_on_host = device is None
        self.elements = self._all.unbind()
        self._version = self._all._version

    def are_even(self) -> bool:
        """Whether nobody has set any of them since they were counted."""
        return self._all._version == self._version

    def count(self, made: Tensor | None = None) -> float | Tensor:
        """One step more, of which `made`, 0-d, says on the device whether it is; returns the number of the step that is
        tried, which waits for nothing."""
        before = None if made is None else self._all[0] + 1
        self._all.add_(1 if made is None else made.to(self._all.device))
        self._version = self._all._version
        if self._is_on_host:
            return float(self._all[0])
        return self._all[0] if before is None else before


class Row(NamedTuple):
    """Parameters of one sweep, one group, one step and one kind of mains, column by column."""

    sweep: Sweep
    group: int
    kind: str | None  # MAIN, REMAINDER, or None
    places: tuple[int, ...]  # among all parameters
    params: list[Tensor]
    states: list[dict[str, Tensor]]
    matrices: list[MatrixSpec]
    firsts: tuple[int, ...]  # of the parameters where there are `spans`, else of what is here
    spans: list[tuple[Span, ...]] | None  # None: every parameter is one span
    steps: Steps

    def holds(self, grad: Tensor | None) -> bool:
        """Whether all have made as many steps, and are still where their first gradient is."""
        return self.steps.are_even() and grad is not None and grad.device == self.sweep.device

    def works(self, params: list[Tensor], grads: list[Tensor]) -> Works:
        """What is to be done with these, the local shards of DTensors."""
        if self.spans is not None:
            return self._works_by_span(params, grads, self.spans)
        kept = params if self.kind is None else [state[self.kind] for state in self.states]
        return Works(
            grads,
            mains=None if self.kind == REMAINDER else kept,
            states=self.states,
            outs=None if self.kind is None else params,
            remainders=kept if self.kind == REMAINDER else None,
            matrices=self.matrices,
            firsts=self.firsts,
        )

    def _works_by_span(self, params: list[Tensor], grads: list[Tensor], spans: list[tuple[Span, ...]]) -> Works:
        """A work for each span, as stochastic rounding must number them; the parameters are their own mains."""
        cuts = [(index, span) for index, of_param in enumerate(spans) for span in of_param]

        def cut(tensor: Tensor, span: Span) -> Tensor:
            return tensor.view(-1)[span.begin : span.begin + span.numel]

        grads = [grad.contiguous() for grad in grads]
        return Works(
            [cut(grads[index], span) for index, span in cuts],
            mains=[cut(params[index], span) for index, span in cuts],
            states=[
                {name: cut(state, span) for name, state in self.states[index].items() if name != STEP}
                for index, span in cuts
            ],
            firsts=tuple(self.firsts[index] + span.first for index, span in cuts),
        )


class Roster:
    """The rows of the parameters that have gradients now."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[Tensor, dict[str, Tensor]],
        enrol: Callable[[int, int, Tensor, int], Member],  # from place, group, parameter, first
        *,
        steps_on_device: bool = False,
    ) -> None:
        """`enrol` makes the state of a parameter that has none. Raises ValueError for a sparse or complex gradient."""
        self._params = params_of(groups)
        self._sizes = [len(group["params"]) for group in groups]
        self._missing = [param.grad is None for param in self._params]
        members = []
        place = first = 0
        for index, group in enumerate(groups):
            for param in group["params"]:
                if param.grad is not None:
                    _refuse(param.grad)
                    members.append(enrol(place, index, param, first))
                place, first = place + 1, first + param.numel()
        self._rows = _rows(members, steps_on_device=steps_on_device)
        self._states = list(state.values())
        self._of_members = [member.state for member in members]
        self._steps = [state[STEP] for state in self._of_members]
        self._distributed = any(map(is_dtensor, self._params))

    def gradients(
        self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, dict[str, Tensor]]
    ) -> list[Tensor | None] | None:
        """Those of all parameters, where the roster holds: the same have gradients, and the states that they had."""
        params = params_of(groups)
        grads: list[Tensor | None] = list(map(_GRAD, params))
        holds = (
            _same(params, self._params)
            and [len(group["params"]) for group in groups] == self._sizes
            and list(map(is_, grads, repeat(None))) == self._missing
            and _same(list(state.values()), self._states)
            and _same([of_member[STEP] for of_member in self._of_members], self._steps)
            and all(row.holds(grads[row.places[0]]) for row in self._rows)
        )
        return grads if holds else None

    def batches(
        self,
        grads: Sequence[Tensor | None],
        hyper: Callable[[int, Sweep, float | Tensor], Hyper],
        made: Tensor | None = None,
    ) -> dict[Sweep, list[Batch]]:
        """The works of this step by sweep; counts each parameter's step. `hyper` is made from group, sweep and step.
        `made`: see `Steps.count`."""
        found: dict[Sweep, list[Batch]] = {}
        for row in self._rows:
            of_row: list[Any] = [grads[place] for place in row.places]
            params = row.params
            if self._distributed:
                params, of_row = list(map(local, params)), list(map(local, of_row))
            batch = Batch(hyper(row.group, row.sweep, row.steps.count(made)), row.works(params, of_row))
            found.setdefault(row.sweep, []).append(batch)
        return found


def params_of(groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """All parameters, in order."""
    return [param for group in groups for param in group["params"]]


def _refuse(grad: Tensor) -> None:
    if grad.is_sparse:
        raise ValueError("a sparse gradient: the sweeps need every element; give dense ones, as with sparse=False")
    if not grad.is_floating_point():
        raise ValueError(
            f"a gradient of {grad.dtype}: the sweeps compute with real floats; give complex parameters as "
            "torch.view_as_real has them"
        )


def _rows(members: Sequence[Member], *, steps_on_device: bool) -> list[Row]:
    by_row: dict[tuple[Sweep, int, str | None, float], list[Member]] = {}
    for member in members:
        assert member.param.grad is not None
        sweep = Sweep(member.rule, member.param.grad.device)
        kind = next((name for name in (REMAINDER, MAIN) if name in member.state), None)
        by_row.setdefault((sweep, member.group, kind, float(member.state[STEP])), []).append(member)
    return [_row(*key, of_row, key[0].device if steps_on_device else None) for key, of_row in by_row.items()]


def _row(
    sweep: Sweep, group: int, kind: str | None, step: float, members: Sequence[Member], steps_on: torch.device | None
) -> Row:
    steps = Steps(step, len(members), steps_on)
    apart = any(len(member.spans) > 1 for member in members)
    for member, element in zip(members, steps.elements):
        member.state[STEP] = element
    return Row(
        sweep=sweep,
        group=group,
        kind=kind,
        places=tuple(member.place for member in members),
        params=[member.param for member in members],
        states=[member.state for member in members],
        matrices=[member.matrix for member in members],
        firsts=tuple(member.first + (0 if apart or not member.spans else member.spans[0].first) for member in members),
        spans=[member.spans for member in members] if apart else None,
        steps=steps,
    )


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether these are the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))
