"""`Unit`: one rule, and the pieces of parameters on this rank that it updates."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_distributed.buffers.stored import SparseGradientError, UnusableGradientError
from opt_distributed.pieces.counts import StepCount
from opt_distributed.pieces.exchange import ComputeStage, init_state, update_
from opt_distributed.pieces.offload import HostSide
from opt_distributed.pieces.piece import Kinds, OwnedPiece, Ready, kinds_of
from opt_distributed.pieces.sources import Publisher, ReadGrads, ReadWhole, Source, check_dense, is_sparse
from opt_distributed.step.hooked import (
    CutParams,
    CutRows,
    HookedStep,
    LocalRows,
    ScaledBatches,
    add_over_ranks_,
    begin_,
    means_of_pieces,
    means_over_ranks,
    means_to_host,
)
from opt_distributed.step.hyper import read_hyper
from opt_distributed.step.piece_runs import PieceRun, runs_of
from opt_distributed.step.verdict import times
from opt_kernels.hooks import HookedUpdate
from opt_kernels.rules import Needs, Rule
from opt_kernels.works import Batch
from opt_paramgroups import ParamId

_COUNT, _LAYOUT = attrgetter("count"), attrgetter("layout")


@dataclass(slots=True, kw_only=True)
class Unit:
    """One rule, and the pieces on this rank that it updates. A rank that owns nothing has no pieces."""

    name: str
    rule: Rule
    pieces: Sequence[OwnedPiece]
    completes: Sequence[Publisher] = ()  # sources to which no later unit of the step writes, on any rank
    stages: Sequence[ComputeStage] = ()  # of pieces that are parts of matrices; in the same order on all ranks
    cut: Sequence[CutParams] = ()  # parameters of which other ranks own parts, if hooks read norms
    cut_rows: Sequence[CutRows] = ()  # parameters whose rows span ranks, if hooks read rows of gradients
    host: HostSide | None = None  # if state is in host memory: copies gradients there, and parameters back
    read_grads: ReadGrads = field(init=False)  # of all pieces
    _kinds: Kinds = field(init=False)  # of all pieces
    _runs: list[PieceRun] = field(init=False, default_factory=list)  # of all pieces
    _counts: list[StepCount] = field(init=False, default_factory=list)  # of all pieces, when `_runs` were made

    def __post_init__(self) -> None:
        self.read_grads = _reader(self.pieces)
        self._kinds = kinds_of(self.pieces)

    def ready(self, refuse: Callable[[UnusableGradientError], None]) -> Ready:
        """Read the gradients: the pieces that have one. Zeros in place of a gradient that no rank has are included.

        Pieces with sparse gradients are left out, after a call of `refuse`.
        """
        found = self.read_grads()
        grads = [grad for grad in found if grad is not None]
        if not set(map(_LAYOUT, grads)) <= {torch.strided}:
            try:
                check_dense((piece.id for piece in self.pieces), found)
            except SparseGradientError as error:
                refuse(error)
            found = [None if is_sparse(grad) else grad for grad in found]
            grads = [grad for grad in found if grad is not None]
        if len(grads) == len(found):
            return Ready(self.pieces, grads, self._kinds)
        return Ready([piece for piece, grad in zip(self.pieces, found, strict=True) if grad is not None], grads)

    @property
    def begins(self) -> bool:
        """Whether `begin_` does anything, or takes part in a collective."""
        return self.host is not None or isinstance(self.rule, HookedUpdate) or bool(self.cut) or bool(self.cut_rows)

    @torch.no_grad()
    def begin_(
        self,
        ready: Ready,
        groups: Sequence[Mapping[str, Any]],
        *,
        scale_of_slot: Sequence[float | Tensor],
        skip: Tensor | None = None,
        row_means: Mapping[ParamId, Tensor] = MappingProxyType({}),  # of parameters whose rows span ranks
    ) -> HookedStep | None:
        """Compute the directions of the ready pieces, if hooks read their norms; writes the rule's states.

        If the unit is in host memory, this queues the copies to it, and waits for them only if there are such hooks.
        """
        if self.host is None:
            return self._begin_(ready, groups, scale_of_slot, skip, row_means)
        assert skip is not None
        self.host.fetch_(ready.pieces, ready.grads, scale_of_slot, skip)
        if not isinstance(self.rule, HookedUpdate):
            return None
        proceeds, grads, scales = self.host.wait(ready.pieces, ready.grads)
        here = Ready(ready.pieces, grads) if proceeds else Ready((), ())
        row_means = means_to_host(row_means, here.pieces, self.host.device)
        with self.host.device.on_host():
            return self._begin_(here, self.host.numbers_of(groups), scales, None, row_means)

    def _begin_(
        self,
        ready: Ready,
        groups: Sequence[Mapping[str, Any]],
        scale_of_slot: Sequence[float | Tensor],
        skip: Tensor | None,
        row_means: Mapping[ParamId, Tensor],
    ) -> HookedStep | None:
        if not isinstance(self.rule, HookedUpdate):
            return None
        host = None if self.host is None else self.host.device
        calls = []
        for scale, runs in self._runs_by_scale(ready, scale_of_slot):
            pieces = [piece for run in runs for piece in run.pieces]
            means = means_of_pieces(self.cut_rows, pieces, row_means) if self.cut_rows else ()
            batches = self._batches(runs, ready, groups)
            calls.append(ScaledBatches(scale, batches, [piece.id for piece in pieces], means))
        return begin_(self.rule, calls, stages=self.stages, cut=self.cut, skip=skip, on_host_of=host)

    def update_(
        self,
        ready: Ready,
        groups: Sequence[Mapping[str, Any]],
        *,
        scale_of_slot: Sequence[float | Tensor],  # by which the gradients of each norm slot are multiplied
        skip: Tensor | None = None,  # 0-d bool on the device; if it is set, nothing is written or counted
        begun: HookedStep | None = None,  # the result of `begin_`, with the sums of cut parameters reduced
    ) -> None:
        """Update the ready pieces by one step of the rule. The caller has turned gradients off."""
        if self.host is None:
            self._update_(ready, groups, scale_of_slot, skip, begun)
            return
        proceeds, grads, scales = self.host.wait(ready.pieces, ready.grads)
        if proceeds:
            with self.host.device.on_host():
                self._update_(Ready(ready.pieces, grads), self.host.numbers_of(groups), scales, None, begun)
            self.host.return_(ready.pieces)

    def _update_(
        self,
        ready: Ready,
        groups: Sequence[Mapping[str, Any]],
        scale_of_slot: Sequence[float | Tensor],
        skip: Tensor | None,
        begun: HookedStep | None,
    ) -> None:
        """Read the rule's columns, update them, and count."""
        if begun is not None:
            begun.finish_(skip=skip)
        for scale, runs in self._runs_by_scale(ready, scale_of_slot):
            for together in self._calls(runs):
                if begun is None:
                    batches = self._batches(together, ready, groups)
                    update_(self.rule, batches, grad_scale=scale, stages=self.stages, skip=skip)
                for run in together:
                    run.close_(skip=skip)
                    run.count.advance(skip)

    def _calls(self, runs: list[PieceRun]) -> list[list[PieceRun]]:
        """The runs that each call of the rule updates.

        Coded mains are decoded during a call, so each of their runs has its own call to save memory. Not if ranks
        compute matrices together: their collectives must not depend on the coded mains of one rank.
        """
        if self.stages or not any(run.is_decoded for run in runs):
            return [runs]
        return [[run] for run in runs]

    def _runs_by_scale(self, ready: Ready, scale_of_slot: Sequence[float | Tensor]) -> Iterable["_Scaled"]:
        """Group runs by the scale of their gradients."""
        found: dict[tuple[int, float], _Scaled] = {}
        for run in self._runs_of(ready.pieces):
            slot, by = run.key.norm_slot, run.key.source.grad_scale
            if (slot, by) not in found:
                found[slot, by] = _Scaled(times(scale_of_slot[slot], by), [])
            found[slot, by].runs.append(run)
        return found.values()

    def _batches(self, runs: Sequence[PieceRun], ready: Ready, groups: Sequence[Mapping[str, Any]]) -> list[Batch]:
        batches, own = [], getattr(self.rule, "hyper_names", ())
        for run in runs:
            works = run.works(ready.grads)
            hyper = read_hyper(groups[run.key.group], step=run.count.next(), own=own)
            # Matrix rules iterate over works more than once; elementwise ones may never create a `Work`.
            batches.append(Batch(hyper, list(works) if self.rule.needs is Needs.MATRICES else works))
        return batches

    def _runs_of(self, pieces: Sequence[OwnedPiece]) -> list[PieceRun]:
        """The runs of these pieces. Those of all pieces are kept until one gets another `StepCount`: by a load, or an
        update of some of them."""
        if pieces is not self.pieces:
            return runs_of(pieces, self.rule)
        if list(map(_COUNT, pieces)) != self._counts:  # loaded, or updated without the others
            self._runs = runs_of(pieces, self.rule)
            self._counts = list(map(_COUNT, pieces))
        return self._runs

    def counts(self, ready: Ready) -> list[StepCount]:
        """The counts of updates of these pieces, one for each run."""
        return [run.count for run in self._runs_of(ready.pieces)]

    def memory(self) -> list[Tensor]:
        """All tensors that an update of all pieces writes."""
        return [tensor for piece in self.pieces for tensor in (piece.main.target, *_kept(piece))]

    def fresh_state(self, piece: OwnedPiece) -> dict[str, Tensor]:
        """The state of one of its pieces before the first step."""
        return init_state(self.rule, piece.main.value(), id=piece.id, matrix=piece.matrix, stage=piece.stage)

    def state_bytes(self) -> int:
        """Bytes that this rank keeps for the unit in addition to parameters and gradients."""
        return sum(tensor.numel() * tensor.element_size() for piece in self.pieces for tensor in _kept(piece))


def begin_units_(
    units: Sequence[Unit],
    ready: Sequence[Ready],
    groups: Sequence[Mapping[str, Any]],
    *,
    scale_of_slot: Sequence[float | Tensor],
    skip: Tensor | None,
    device: torch.device,  # of tensors that are sent between ranks
) -> list[HookedStep | None]:
    """Call `Unit.begin_` on all units, and reduce sums of cut parameters. Raises CollectiveError if a peer is lost."""
    if not any(unit.begins for unit in units):
        return [None] * len(units)
    for unit in units:
        if unit.host is not None:
            unit.host.numbers.forget()
    local = [
        LocalRows(unit.cut_rows, of_unit.pieces, of_unit.grads) for unit, of_unit in zip(units, ready, strict=True)
    ]
    means = means_over_ranks(local, device=device)
    begun = [
        unit.begin_(of_unit, groups, scale_of_slot=scale_of_slot, skip=skip, row_means=means)
        for unit, of_unit in zip(units, ready, strict=True)
    ]
    add_over_ranks_(begun, device=device)
    return begun


def _reader(pieces: Sequence[OwnedPiece]) -> ReadGrads:
    """The reader of the gradients of all pieces, in order."""
    places: dict[Source, list[int]] = {}
    for place, piece in enumerate(pieces):
        places.setdefault(piece.source, []).append(place)
    reads = [
        (source.reader([(pieces[place].id, pieces[place].of_param) for place in at]), at)
        for source, at in places.items()
    ]
    if len(reads) == 1:
        return reads[0][0]
    if all(isinstance(of_source, ReadWhole) for of_source, _ in reads):
        return ReadWhole([piece.param for piece in pieces])

    def read() -> list[Tensor | None]:
        grads: list[Tensor | None] = [None] * len(pieces)
        for of_source, at in reads:
            for place, grad in zip(at, of_source(), strict=True):
                grads[place] = grad
        return grads

    return read


class _Scaled(NamedTuple):
    """Runs whose gradients have the same scale."""

    scale: float | Tensor
    runs: list[PieceRun]


def _kept(piece: OwnedPiece) -> Iterator[Tensor]:
    yield from piece.state.values()
    yield from piece.main.kept()
