"""Rounds of kept works: computed once, then completed with the gradients of each step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from opt_kernels.backends.triton.columns import lies_in_order, uniform
from opt_kernels.backends.triton.kept_works import picker
from opt_kernels.matrices.muon import Factors, Inputs
from opt_kernels.matrices.muon.rounds import Round, alike_tasks, rounds
from opt_kernels.works import Batch, Unchanged, Work, Works


class _Piece(NamedTuple):
    """Works of one kind in a round, without gradients."""

    row: int
    columns: Works
    unchanged: Unchanged
    pick: Callable[[Sequence[Any]], Any]  # the entries of its works among those of all

    def with_grads(self, grads: Sequence[Any], grads_at: Sequence[int]) -> tuple[int, Works]:
        at = self.pick(grads_at)
        return self.row, self.columns.with_grads(self.pick(grads), unchanged=self.unchanged, grads_at=at)


class _Kept(NamedTuple):
    """A round whose works have their mains as placeholders for gradients, so that no gradient is kept alive."""

    round: Round
    pieces: list[_Piece]


def kept_rounds(batches: Sequence[Batch], inputs: Callable[[Work], Inputs], factors: Factors) -> list[Round] | None:
    """The result of `rounds`, for callers that read layouts only. None if works are not kept, or a gradient is not in
    C order."""
    columns = [works for _, works in batches if isinstance(works, Works) and works.unchanged is not None]
    if not columns or len(columns) < len(batches):
        return None
    first = columns[0].unchanged
    assert first is not None
    key = (kept_rounds, tuple([works.unchanged for works in columns]), inputs, factors)
    if key not in first.cache:
        first.cache[key] = _found(batches, columns, inputs, factors)
    kept: list[_Kept] | None = first.cache[key]
    if kept is None:
        return None
    grads, grads_at = columns[0].grads, columns[0].grads_at
    if len(columns) > 1:
        grads = list(chain.from_iterable([works.grads for works in columns]))
        grads_at = tuple(chain.from_iterable([works.grads_at for works in columns]))
    return [one._replace(pieces=[piece.with_grads(grads, grads_at) for piece in pieces]) for one, pieces in kept]


def _found(
    batches: Sequence[Batch], columns: Sequence[Works], inputs: Callable[[Work], Inputs], factors: Factors
) -> list[_Kept] | None:
    if not all(lies_in_order(grad) for works in columns for grad in works.grads):
        return None
    without = [Batch(hyper, [_without_grad(work) for work in works]) for hyper, works in batches]
    number = {id(work): index for index, work in enumerate(work for _, works in without for work in works)}
    hypers = [hyper for hyper, _ in without]
    kept = []
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
        kept.append(_Kept(one, pieces))
    return kept


def _without_grad(work: Work) -> Work:
    anchor = work.main if work.main is not None else work.out
    assert anchor is not None
    return replace(work, grad=anchor)
