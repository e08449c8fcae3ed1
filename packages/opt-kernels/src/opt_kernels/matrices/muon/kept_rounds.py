"""Rounds of works whose tensors stay in place: planned once, then used with the gradients of each step."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from opt_kernels.backends.kept.works import picker
from opt_kernels.backends.triton.columns import lies_in_order, uniform
from opt_kernels.backends.triton.sweep import KeptSweeps, Launches
from opt_kernels.codecs import StateCodec
from opt_kernels.matrices.muon import Factors, Inputs
from opt_kernels.matrices.muon.reference import MOMENTUM
from opt_kernels.matrices.muon.rounds import Round, SlotRuns, alike_tasks, in_order, pieces_of, rounds, swept
from opt_kernels.works import Batch, Unchanged, Work, Works


class RoundSweeps(NamedTuple):
    """A round, and the launches that sweep its works in this step."""

    round: Round
    launches: Launches


class _Piece(NamedTuple):
    """Works of one kind in a round, without gradients."""

    row: int
    columns: Works
    unchanged: Unchanged
    pick: Callable[[Sequence[Tensor]], Sequence[Tensor]]  # the entries of its works among those of all

    def works(self, all_works: Sequence[Works], grads_at: Hashable) -> tuple[int, Works]:
        """The works of this step, with their row of the scalar block."""

        def grads() -> Sequence[Tensor]:
            return self.pick(list(chain.from_iterable([works.grads for works in all_works])))

        return self.row, self.columns.with_grads(grads, unchanged=self.unchanged, grads_at=grads_at)


class RoundPlan(NamedTuple):
    """A round whose works have their mains as placeholders for gradients, so that no gradient is kept alive."""

    round: Round
    pieces: list[_Piece]
    kept: KeptSweeps

    def sweeps(self, all_works: Sequence[Works], grads_at: Hashable) -> RoundSweeps:
        """The sweeps over the works of this step."""
        launches = self.kept.launches(grads_at, lambda: [piece.works(all_works, grads_at) for piece in self.pieces])
        return RoundSweeps(self.round, in_order(launches))


class _Plan(NamedTuple):
    """The plan of a step of one rule."""

    inputs: Callable[[Work], Inputs]
    factors: Factors
    codec: StateCodec
    rounds: list[RoundPlan] | None  # None: a gradient is not in C order


def rounds_of(
    batches: Sequence[Batch], inputs: Callable[[Work], Inputs], factors: Factors, codec: StateCodec
) -> Iterator[RoundSweeps]:
    """The rounds of a step."""
    hypers = [hyper for hyper, _ in batches]
    for one in rounds(batches, inputs, factors):
        yield RoundSweeps(one, swept(pieces_of(one, hypers), SlotRuns(one, codec)))


def kept_rounds(
    batches: Sequence[Batch], inputs: Callable[[Work], Inputs], factors: Factors, codec: StateCodec
) -> Iterator[RoundSweeps] | None:
    """The result of `rounds_of`, for callers that read layouts only. None if works are not kept, or a gradient is not
    in C order."""
    columns = [works for _, works in batches if isinstance(works, Works) and works.unchanged is not None]
    if not columns or len(columns) < len(batches):
        return None
    assert columns[0].unchanged is not None
    cache, key = columns[0].unchanged.cache, (kept_rounds, *[works.unchanged for works in columns])
    plan: _Plan | None = cache.get(key)
    if plan is None or plan[:3] != (inputs, factors, codec):
        plan = cache[key] = _Plan(inputs, factors, codec, _planned(batches, columns, inputs, factors, codec))
    if plan.rounds is None:
        return None
    grads_at = tuple([works.grads_at for works in columns])
    return (one.sweeps(columns, grads_at) for one in plan.rounds)


def _planned(
    batches: Sequence[Batch],
    columns: Sequence[Works],
    inputs: Callable[[Work], Inputs],
    factors: Factors,
    codec: StateCodec,
) -> list[RoundPlan] | None:
    if not all(lies_in_order(grad) for works in columns for grad in works.grads):
        return None
    without = [Batch(hyper, [_without_grad(work) for work in works]) for hyper, works in batches]
    number = {id(work): index for index, work in enumerate(work for _, works in without for work in works)}
    hypers = [hyper for hyper, _ in without]
    plans = []
    for one in rounds(without, inputs, factors):
        pieces = [
            _Piece(
                row,
                uniform([task.work for task in tasks])[0],
                Unchanged(),
                picker([number[id(task.work)] for task in tasks]),
            )
            for row, tasks in alike_tasks(one, hypers)
        ]
        device = one.stacks[0].tasks[0].work.grad.device
        plans.append(RoundPlan(one, pieces, KeptSweeps(device, {MOMENTUM: codec}, SlotRuns(one, codec))))
    return plans


def _without_grad(work: Work) -> Work:
    anchor = work.main if work.main is not None else work.out
    assert anchor is not None
    return replace(work, grad=anchor)
