"""The parameters that are updated together, determined once and kept until something about them changes.

A step over hundreds of parameters would otherwise spend more time on grouping them than on launching the update. A
row stores columns with one entry per parameter, and processes whole columns at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from opt_kernels.dtensor import is_dtensor, local
from opt_kernels.optim.mains import MAIN, REMAINDER
from opt_kernels.optim.rows import Member, Row, Steps, Sweep
from opt_kernels.optim.state import STEP
from opt_kernels.optim.written_params import WrittenParams
from opt_kernels.works import Batch, Hyper, Works

_GRAD, _LAYOUT = attrgetter("grad"), attrgetter("layout")
_PARAMS = itemgetter("params")


class ParamRows:
    """The parameters that currently have gradients, grouped into rows."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        state: Mapping[Tensor, dict[str, Tensor]],
        member_of: Callable[[int, int, Tensor, int], Member],  # arguments: position, group, parameter, first
        *,
        steps_on_device: bool = False,
        before: "ParamRows | None" = None,  # the rows of the last step, if there are any
    ) -> None:
        """`member_of` creates missing state of a parameter. Raises ValueError for a sparse or complex gradient."""
        self._params = params_of(groups)
        self._sizes = [len(group["params"]) for group in groups]
        self._missing = [param.grad is None for param in self._params]
        members = []
        position = first = 0
        for index, group in enumerate(groups):
            for param in group["params"]:
                if param.grad is not None:
                    _refuse(param.grad)
                    members.append(member_of(position, index, param, first))
                position, first = position + 1, first + param.numel()
        self._rows = _rows(members, steps_on_device=steps_on_device)
        followed = {} if before is None else before.written.followed
        self.written: WrittenParams = WrittenParams(
            members, {param: followed[param] for param in self._params if param in followed}
        )
        self._states = list(state.values())
        self._of_members = [member.state for member in members]
        self._steps = [state[STEP] for state in self._of_members]
        self._distributed = any(map(is_dtensor, self._params))

    def hold(self, groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, dict[str, Tensor]]) -> bool:
        """Whether the rows are up to date: the same parameters have gradients, and the same objects are their states
        and step counts."""
        return (
            list(map(len, map(_PARAMS, groups))) == self._sizes
            and _same(params_of(groups), self._params)
            and list(map(is_, map(_GRAD, self._params), repeat(None))) == self._missing
            and _same(list(state.values()), self._states)
            and _same([of_member.get(STEP) for of_member in self._of_members], self._steps)
            and all(row.holds(self._params[row.positions[0]].grad) for row in self._rows)
        )

    def batches(
        self, hyper: Callable[[int, Sweep, float | Tensor], Hyper], made: Tensor | None = None
    ) -> dict[Sweep, list[Batch]]:
        """The works of this step by sweep. Counts the step of each parameter. `hyper` maps group, sweep and step to a
        `Hyper`; `made` is passed to `Steps.count`."""
        found: dict[Sweep, list[Batch]] = {}
        all_works = list(map(self._works, self._rows))  # raises before any step is counted
        for row, works in zip(self._rows, all_works, strict=True):
            step = row.steps.count(made)
            found.setdefault(row.sweep, []).append(Batch(hyper(row.group, row.sweep, step), works))
        return found

    def _works(self, row: Row) -> Works:
        """The works of a row, for tensors at any address."""
        params: list[Tensor] = row.params
        of_row: list[Any] = list(map(_GRAD, params))
        for grad in () if set(map(_LAYOUT, of_row)) <= {torch.strided} else of_row:
            _refuse(grad)
        if self._distributed:
            params, of_row = list(map(local, params)), list(map(local, of_row))
        return row.works(params, of_row)


def params_of(groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """All parameters, in order."""
    return list(chain.from_iterable(map(_PARAMS, groups)))


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _refuse(grad: Tensor) -> None:
    if grad.is_sparse:
        raise ValueError("a sparse gradient: only dense gradients are supported; pass dense ones, as with sparse=False")
    if not grad.is_floating_point():
        raise ValueError(
            f"a gradient of {grad.dtype}: only real floating-point gradients are supported; pass "
            "torch.view_as_real(param) for complex parameters"
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
        positions=tuple(member.position for member in members),
        params=[member.param for member in members],
        states=[member.state for member in members],
        matrices=[member.matrix for member in members],
        firsts=tuple(member.first + (0 if apart or not member.spans else member.spans[0].first) for member in members),
        spans=[member.spans for member in members] if apart else None,
        steps=steps,
    )
