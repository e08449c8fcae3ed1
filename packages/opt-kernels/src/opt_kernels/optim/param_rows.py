"""Rows: parameters that are updated together, as columns, and the factor of their gradients.

Rows are kept until something about them changes. A step over hundreds of parameters would otherwise spend more time on
grouping them than on launching the update.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import grad_stats
from opt_kernels.codecs.narrow import NOISE_BLOCK
from opt_kernels.dtensor import Span, are_dtensors, local
from opt_kernels.optim.state import STEP
from opt_kernels.params import MAIN, REMAINDER, Count, FollowingMains, Groups
from opt_kernels.params.writes import Marks
from opt_kernels.rules.base import Rule
from opt_kernels.works import Batch, Hyper, MatrixSpec, Scalar, Skip, States, Works

_GRAD = attrgetter("grad")
_LAYOUT = attrgetter("layout")
_PARAMS = itemgetter("params")


class Sweep(NamedTuple):
    """The rule and device of one call of a rule."""

    rule: Rule
    device: torch.device


SweepBatches = dict[Sweep, list[Batch]]


class Member(NamedTuple):
    """One parameter that has a gradient."""

    position: int  # among all parameters
    group: int
    param: Tensor
    state: States
    rule: Rule
    matrix: MatrixSpec
    spans: tuple[Span, ...]  # of the local elements, by their numbers among those of all parameters


class _Row:
    """Parameters of one sweep, group, step count and kind of mains."""

    def __init__(self, sweep: Sweep, members: Sequence[Member], *, step: int, on_device: bool) -> None:
        self.sweep = sweep
        self.group = members[0].group
        self.params = [member.param for member in members]
        self.positions = [member.position for member in members]
        self.states = [member.state for member in members]
        self.kind = _kind(members[0])
        # float32, and on the host unless capturable, as in torch.optim
        device = sweep.device if on_device else torch.device("cpu")
        with torch.inference_mode(False):  # a step outside of inference mode must be able to write it, too
            shown = torch.full((len(members),), step, dtype=torch.float32, device=device)
            elements = shown.unbind()
        for state, element in zip(self.states, elements):
            state[STEP] = element
        self.count = Count(step, shown=shown)
        if on_device:
            self.count.stay_on(sweep.device)
        self._matrices = [member.matrix for member in members]
        self._cuts: list[tuple[int, Span]] = []  # the spans, with the index of their parameter; empty: one in each
        if any(len(member.spans) > 1 for member in members):
            self._cuts = [(index, span) for index, member in enumerate(members) for span in member.spans]
        self._firsts = tuple(member.spans[0].first if member.spans else 0 for member in members)

    def holds(self) -> bool:
        """Whether all have the same step count, and are on the device of their first gradient."""
        grad = self.params[0].grad
        return self.count.is_as_shown() and grad is not None and grad.device == self.sweep.device

    def works(self, grads: list[Any]) -> Works:
        """The works of the row, for tensors at any address. Raises ValueError for a gradient that is not dense."""
        params = self.params
        if not set(map(_LAYOUT, grads)) <= {torch.strided}:
            for grad in grads:
                _check(grad)
        if are_dtensors(params):
            params = list(map(local, params))
            grads = list(map(local, grads))
        if self._cuts:
            return self._works_by_span(params, grads)
        works = Works(grads, mains=params, states=self.states, matrices=self._matrices, firsts=self._firsts)
        if self.kind is not None:
            kept = [state[self.kind] for state in self.states]
            works.outs = params
            works.mains = None if self.kind == REMAINDER else kept
            works.remainders = kept if self.kind == REMAINDER else None
        return works

    def _works_by_span(self, params: list[Tensor], grads: list[Tensor]) -> Works:
        """One work per span, for the numbering of stochastic rounding. The parameters are their own mains."""
        cut_grads = []
        mains = []
        states = []
        for index, (begin, numel, _) in self._cuts:
            cut = slice(begin, begin + numel)
            state = self.states[index]
            cut_grads.append(grads[index].contiguous().view(-1)[cut])
            mains.append(params[index].view(-1)[cut])
            states.append({name: tensor.view(-1)[cut] for name, tensor in state.items() if name != STEP})
        firsts = tuple(span.first for _, span in self._cuts)
        return Works(cut_grads, mains=mains, states=states, firsts=firsts)


class Rows:
    """The parameters that currently have gradients, in rows."""

    def __init__(
        self,
        groups: Groups,
        state: Mapping[Tensor, States],
        member_of: Callable[[int, int, Tensor, int], Member],  # arguments: position, group, parameter, first
        *,
        steps_on_device: bool = False,
        followed: Mapping[Tensor, Marks],  # of the rows of the last step, see `FollowingMains`
    ) -> None:
        """`member_of` creates missing state of a parameter. Raises ValueError for a sparse or complex gradient."""
        self._params = params_of(groups)
        self._sizes = [len(group["params"]) for group in groups]
        self._grads: list[Any] = []  # from `hold` to `batches`
        self._missing = [param.grad is None for param in self._params]
        members = []
        by_row: dict[tuple[Sweep, int, str | None, int], list[Member]] = {}
        position = 0
        first = 0
        for index, group in enumerate(groups):
            for param in group["params"]:
                if param.grad is not None:
                    _check(param.grad)
                    member = member_of(position, index, param, first)
                    members.append(member)
                    sweep = Sweep(member.rule, param.grad.device)
                    key = (sweep, index, _kind(member), int(member.state[STEP]))
                    by_row.setdefault(key, []).append(member)
                position += 1
                first += -(-param.numel() // NOISE_BLOCK) * NOISE_BLOCK  # each begins with a block: sweeps are faster
        self._rows = []
        for (sweep, _, _, step), row in by_row.items():
            self._rows.append(_Row(sweep, row, step=step, on_device=steps_on_device))
        pairs = [(member.param, member.state) for member in members]
        still_followed = {param: followed[param] for param in self._params if param in followed}
        self.mains = FollowingMains(pairs, still_followed)
        self._states = list(state.values())
        self._of_members = [member.state for member in members]
        self._steps = [state[STEP] for state in self._of_members]

    def hold(self, groups: Groups, state: Mapping[Tensor, States]) -> bool:
        """Whether the rows are up to date: the same parameters have gradients, and the same objects are their states
        and step counts."""
        self._grads = list(map(_GRAD, self._params))
        sizes = list(map(len, map(_PARAMS, groups)))
        if sizes != self._sizes or not _same(params_of(groups), self._params):
            return False
        missing = list(map(is_, self._grads, repeat(None)))
        if missing != self._missing or not _same(list(state.values()), self._states):
            return False
        steps = list(map(dict.get, self._of_members, repeat(STEP)))
        return _same(steps, self._steps) and all(row.holds() for row in self._rows)

    def batches(self, hyper: Callable[[int, Sweep, int | Tensor], Hyper]) -> SweepBatches:
        """The works of this step by sweep. `hyper` maps group, sweep and step to a `Hyper`."""
        found: SweepBatches = {}
        grads = self._grads or list(map(_GRAD, self._params))
        self._grads = []
        for row in self._rows:
            of_row = grads
            if len(row.positions) < len(grads):
                of_row = [grads[i] for i in row.positions]
            numbers = hyper(row.group, row.sweep, row.count.next())
            found.setdefault(row.sweep, []).append(Batch(numbers, row.works(of_row)))
        return found

    def count(self, skip: Skip) -> None:
        """Count the step of each parameter, unless `skip` (0-d bool, on the device) is set."""
        for row in self._rows:
            row.count.advance(skip)
        self.mains.end_update_()


def params_of(groups: Groups) -> list[Tensor]:
    """All parameters, in order."""
    return list(chain.from_iterable(map(_PARAMS, groups)))


def _kind(member: Member) -> str | None:
    """MAIN, REMAINDER, or None."""
    if REMAINDER in member.state:
        return REMAINDER
    return MAIN if MAIN in member.state else None


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _check(grad: Tensor) -> None:
    """Raise ValueError unless the gradient is dense and real."""
    if grad.is_sparse:
        raise ValueError("a sparse gradient: only dense gradients are supported; pass dense ones, as with sparse=False")
    if not grad.is_floating_point():
        raise ValueError(
            f"a gradient of {grad.dtype}: only real floating-point gradients are supported; pass "
            "torch.view_as_real(param) for complex parameters"
        )


def scaling_of(
    params: Sequence[Tensor], *, found_inf: Tensor | None, loss_scale: Tensor | None, max_norm: float | None
) -> tuple[Scalar, Tensor | None, Tensor | None]:
    """The factor of the gradients, whether the step is skipped, and their norm, which follow from `GradScaler` and
    clipping, without synchronizing the host.

    Tensors are 0-d: float64, bool and float64. The norm is None if gradients are not clipped, and infinite or NaN if
    any gradient is.

    Raises ValueError for `max_norm` with a DTensor parameter, whose norm spans ranks.
    """
    skip = None
    if found_inf is not None:
        skip = found_inf.reshape(()) != 0
    scale: Scalar = 1.0
    if loss_scale is not None:
        scale = loss_scale.reshape(()).double().reciprocal()
    if max_norm is None:
        return scale, skip, None
    if are_dtensors(params):
        raise ValueError(
            f"max_norm={max_norm} with a DTensor parameter: its norm spans ranks, and this optimizer does not "
            "communicate; set max_norm=None and call torch.nn.utils.clip_grad_norm_"
        )
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in map(_GRAD, params):
        if grad is not None:
            by_device.setdefault(grad.device, []).append(grad)
    total = torch.zeros((), dtype=torch.float64, device=next(iter(by_device), "cpu"))
    for grads in by_device.values():
        total = total + grad_stats(grads, count_zeros=False).sum_of_squares.to(total.device)
    norm = total.sqrt() * scale
    is_bad = ~(norm < torch.inf)
    # torch computes `max_norm / norm` as a product with the rounded reciprocal; `div_` divides.
    coefficient = torch.full_like(norm, max_norm).div_(norm + 1e-6).clamp_(max=1.0)
    return coefficient * scale, is_bad if skip is None else skip | is_bad, norm


def only_makes_state(groups: Groups) -> bool:
    """Whether all gradients and learning rates are zero in this first step. `torch.distributed.checkpoint` runs such a
    step to create state that it can save or load into. It must not count as a step."""
    if any(float(group["lr"]) for group in groups):
        return False
    grads = [param.grad for param in params_of(groups) if param.grad is not None]
    return not any(map(torch.any, map(local, grads)))
