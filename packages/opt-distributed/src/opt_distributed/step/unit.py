"""A unit: one rule over the pieces of parameters that this rank owns."""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opt_distributed.step.coded_main import CodedMain
from opt_distributed.step.compute import ComputeStage, init_state, update_
from opt_distributed.step.counts import StepCount
from opt_distributed.step.dtensor import local_numel
from opt_distributed.step.hooked import CutParams, HookedStep, ScaledBatches, add_over_ranks_, begin_
from opt_distributed.step.hooked_rows import CutRows, Held, means_of_pieces, means_over_ranks, means_to_host
from opt_distributed.step.host_main import HostMain
from opt_distributed.step.host_side import HostSide
from opt_distributed.step.hyper import read_hyper
from opt_distributed.step.mains import Main
from opt_distributed.step.quantized import QuantizedMain
from opt_distributed.step.sources import ReadGrad, Source
from opt_kernels.hooks import HookedUpdate
from opt_kernels.rules.base import Needs, Rule
from opt_kernels.works import Batch, MatrixSpec, Works
from opt_paramgroups import ParamId

DECODED_NUMEL = 1 << 25
"""Elements of coded mains that are decoded at a time, 128 MiB, and what is left of one piece."""


@dataclass(slots=True, kw_only=True)
class OwnedPiece:
    """What this rank owns of one parameter, in all the places where it lives."""

    id: ParamId
    param: nn.Parameter
    of_param: slice  # flat elements of the (local) parameter
    group: int  # index in `param_groups`
    source: Source  # where its gradient comes from
    main: Main | CodedMain | HostMain | QuantizedMain
    state: dict[str, Tensor]
    norm_slot: int = 0  # which of the step's gradient norms it belongs to
    counted: bool = True  # False where another rank counts these elements in norms and zeros
    inspected: bool = True  # whether this rank looks for infinities and NaNs here; always where it counts
    matrix: MatrixSpec = field(default_factory=MatrixSpec)
    replica: int | None = None  # its number among data-parallel replicas, where these do not hold the same parts
    part: str = ""  # names what is stored here of a plain parameter that tensor-parallel ranks share
    stage: ComputeStage | None = None  # brings it together with the other ranks' parts of the same matrix
    count: StepCount = field(default_factory=StepCount)  # of updates; shared with pieces that always step with it
    read_grad: ReadGrad = field(init=False)

    def __post_init__(self) -> None:
        self.read_grad = self.source.reader(self.id, self.of_param)

    @property
    def moved(self) -> Main | CodedMain | QuantizedMain:
        """The main values where the rule runs."""
        return self.main.moved if isinstance(self.main, HostMain) else self.main

    @property
    def step(self) -> int:
        """Updates made so far. On an accelerator the host waits for it."""
        return int(self.count)

    @step.setter
    def step(self, value: int) -> None:
        self.count = StepCount(value)

    @property
    def is_whole(self) -> bool:
        """Whether it is all that this rank stores of the parameter."""
        return self.of_param == slice(0, local_numel(self.param))


class Ready(NamedTuple):
    """The pieces of a unit whose gradients are there, and these; matched by position. Two lists, no pairs: a step over
    thousands of small parameters spends its time making objects."""

    pieces: Sequence[OwnedPiece]
    grads: Sequence[Tensor]

    def without(self, unused: Collection[ParamId]) -> "Ready":
        """Only what is not of these parameters."""
        kept = [(p, g) for p, g in zip(self.pieces, self.grads, strict=True) if p.id not in unused]
        return Ready([p for p, _ in kept], [g for _, g in kept])


@dataclass(slots=True, kw_only=True)
class Unit:
    """One rule, the pieces it moves here, and the state it keeps of them. A rank that owns nothing has no pieces."""

    name: str
    rule: Rule
    pieces: Sequence[OwnedPiece]
    completes: Sequence[Source] = ()  # sources that no later unit of the step writes to, on any rank
    stages: Sequence[ComputeStage] = ()  # of the pieces that are parts of matrices; in one order on all ranks
    cut: Sequence[CutParams] = ()  # parameters of which other ranks own parts, where hooks see norms
    cut_rows: Sequence[CutRows] = ()  # parameters whose rows span ranks, where hooks see rows of gradients
    host: HostSide | None = None  # where state is on the host of a device: brings gradients there, and parameters back
    _runs: list["_Run"] = field(init=False, default_factory=list)  # of all pieces
    _memory: list[Tensor] = field(init=False, default_factory=list)  # since the runs were made

    def ready(self) -> Ready:
        """The pieces that have a gradient this step, before it is known whether any rank used the parameter."""
        found = [piece.read_grad() for piece in self.pieces]
        grads = [grad for grad in found if grad is not None]
        if len(grads) == len(found):
            return Ready(self.pieces, grads)
        return Ready([piece for piece, grad in zip(self.pieces, found, strict=True) if grad is not None], grads)

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
        """Finds where the ready pieces are to move, if hooks must see that before they do; writes the rule's states.

        Of a unit on the host, this queues the copies there, and waits for them only if there are such hooks.
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

    @torch.no_grad()
    def update_(
        self,
        ready: Ready,
        groups: Sequence[Mapping[str, Any]],
        *,
        scale_of_slot: Sequence[float | Tensor],  # multiplies the gradients of a norm slot
        skip: Tensor | None = None,  # 0-d bool on the device; where it is set, nothing is written or counted
        begun: HookedStep | None = None,  # what `begin_` returned, with the sums of cut parameters added up
    ) -> None:
        """Moves the ready pieces by one step of the rule."""
        if self.host is None:
            self._update_(ready, groups, scale_of_slot, skip, begun)
            return
        proceeds, grads, scales = self.host.wait(ready.pieces, ready.grads)
        if not proceeds:
            return
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
        proceeds = None if skip is None else ~skip
        if begun is not None:
            begun.finish_(skip=skip)
        for scale, runs in self._runs_by_scale(ready, scale_of_slot):
            for together in self._calls(runs):
                if begun is None:
                    batches = self._batches(together, ready, groups)
                    update_(self.rule, batches, grad_scale=scale, stages=self.stages, skip=skip)
                for run in together:
                    run.close_(skip=skip)
                    run.count.advance(proceeds)

    def _calls(self, runs: list["_Run"]) -> list[list["_Run"]]:
        """The runs that one call of the rule moves. Coded mains are decoded for a call: few at a time, unless ranks
        compute matrices together, which must not depend on what one of them decodes."""
        if self.stages or not any(run.is_decoded for run in runs):
            return [runs]
        return [[run] for run in runs]

    def _runs_by_scale(self, ready: Ready, scale_of_slot: Sequence[float | Tensor]) -> list["_Scaled"]:
        """The runs by what their gradients are multiplied by."""
        found: dict[Hashable, _Scaled] = {}
        for run in self._runs_of(ready.pieces):
            slot, by = run.key.norm_slot, run.key.source.grad_scale
            scale = scale_of_slot[slot]
            # Two tensors may have one value, which the host does not know.
            key = (slot, by) if isinstance(scale, Tensor) else scale * by
            if key not in found:
                found[key] = _Scaled(scale * by, [])
            found[key].runs.append(run)
        return list(found.values())

    def _batches(self, runs: Sequence["_Run"], ready: Ready, groups: Sequence[Mapping[str, Any]]) -> list[Batch]:
        batches = []
        for run in runs:
            works = run.works(ready.grads)
            hyper = read_hyper(groups[run.key.group], step=run.count.next(), own=getattr(self.rule, "hyper_names", ()))
            # A matrix rule looks at a work more than once; an elementwise one may never look at any by itself.
            batches.append(Batch(hyper, list(works) if self.rule.needs is Needs.MATRICES else works))
        return batches

    def _runs_of(self, pieces: Sequence[OwnedPiece]) -> list["_Run"]:
        """The runs that these pieces make now; those of all pieces are kept for as long as they take every step
        together."""
        if pieces is not self.pieces:
            return _runs(pieces)
        if not self._runs or not all(run.is_together for run in self._runs) or _may_join(self._runs):
            self._runs = _runs(pieces)
            self._memory = []
        return self._runs

    def counts(self, ready: Ready) -> list[StepCount]:
        """The counts of updates in which these pieces step."""
        return [run.count for run in self._runs_of(ready.pieces)]

    @property
    def memory(self) -> Sequence[Tensor]:
        """All tensors that updates of all pieces write."""
        if not self._memory:
            self._memory = [tensor for piece in self.pieces for tensor in (piece.main.target, *_kept(piece))]
        return self._memory

    def fresh_state(self, piece: OwnedPiece) -> dict[str, Tensor]:
        """The state of one of its pieces, as it is before the first step."""
        return init_state(self.rule, piece.main.value(), id=piece.id, matrix=piece.matrix, stage=piece.stage)

    def state_bytes(self) -> int:
        """Bytes this rank keeps for the unit beside parameters and gradients."""
        return sum(tensor.numel() * tensor.element_size() for piece in self.pieces for tensor in _kept(piece))


@torch.no_grad()
def begin_units_(
    units: Sequence[Unit],
    ready: Sequence[Ready],
    groups: Sequence[Mapping[str, Any]],
    *,
    scale_of_slot: Sequence[float | Tensor],
    skip: Tensor | None,
    device: torch.device,  # of what travels between ranks
) -> list[HookedStep | None]:
    """`Unit.begin_` of all, with the sums of cut parameters added up. Raises CollectiveError where a peer is lost."""
    held = [Held(unit.cut_rows, *of_unit) for unit, of_unit in zip(units, ready, strict=True)]
    means = means_over_ranks(held, device=device)
    begun = [
        unit.begin_(of_unit, groups, scale_of_slot=scale_of_slot, skip=skip, row_means=means)
        for unit, of_unit in zip(units, ready, strict=True)
    ]
    add_over_ranks_(begun, device=device)
    return begun


_COUNT = attrgetter("count")


class _Scaled(NamedTuple):
    """Runs whose gradients are multiplied by the same."""

    scale: float | Tensor
    runs: list["_Run"]


class _Key(NamedTuple):
    """What pieces must share to share a row of the hyper table and what their gradients are multiplied by."""

    source: Source
    norm_slot: int
    group: int
    step: int | StepCount  # updates made so far, or the count itself where only the device knows them
    call: int = 0  # of the coded mains, those that are decoded together


@dataclass(slots=True, kw_only=True)
class _Run:
    """Pieces of one key, in their order: column by column, so that a step makes no object for a piece."""

    key: _Key
    indices: Sequence[int]  # among the pieces that were ready
    pieces: Sequence[OwnedPiece]
    count: StepCount = field(init=False)  # its pieces' own, from now on
    opened: Sequence[CodedMain | QuantizedMain] = ()  # the mains of its pieces, where these are stored after an update
    columns: Works = field(init=False)  # all but the gradients

    def __post_init__(self) -> None:
        self.count = self.pieces[0].count.copy()
        for piece in self.pieces:
            piece.count = self.count
        mains = [piece.moved for piece in self.pieces]
        self.opened = [main for main in mains if isinstance(main, CodedMain | QuantizedMain)]
        self.columns = Works(
            (),
            mains=_column([main.main for main in mains]),
            states=[piece.state for piece in self.pieces],
            outs=_column([main.out for main in mains]),
            remainders=_column([main.remainder for main in mains]),
            matrices=[piece.matrix for piece in self.pieces],
        )

    def works(self, grads: Sequence[Tensor]) -> Works:
        """What a rule has to do, with the gradients of all that is ready. Opens mains until `close_`."""
        of = self.columns
        return Works(
            [grads[index] for index in self.indices],
            mains=[main.open_() for main in self.opened] if self.opened else of.mains,
            states=of.states,
            outs=of.outs,
            remainders=of.remainders,
            matrices=of.matrices,
        )

    def close_(self, *, skip: Tensor | None) -> None:
        """Stores the mains that `works` opened."""
        for main in self.opened:
            main.close_(skip=skip)

    @property
    def is_decoded(self) -> bool:
        """Whether its mains take more memory while they are open."""
        return any(isinstance(main, CodedMain) for main in self.opened)

    @property
    def is_together(self) -> bool:
        """Whether no piece of it has been counted without the others."""
        return all(map(is_, map(_COUNT, self.pieces), repeat(self.count)))


def _may_join(runs: Sequence[_Run]) -> bool:
    """Whether two runs differ in nothing but numbers of steps that have become equal."""
    keys = {run.key._replace(step=run.count if run.count.known is None else run.count.known) for run in runs}
    return len(keys) < len(runs)


def _column(values: Sequence[Tensor | None]) -> list[Tensor] | None:
    """None where nobody has a value: pieces of one source and rule keep their numbers alike."""
    found = [value for value in values if value is not None]
    assert len(found) in (0, len(values))
    return found or None


def _runs(pieces: Sequence[OwnedPiece]) -> list[_Run]:
    """The pieces by key, in their order: the same on every rank that has the same."""
    found: dict[_Key, list[int]] = {}
    num_decoded = 0
    for index, piece in enumerate(pieces):
        step = piece.count if piece.count.known is None else piece.count.known
        num_decoded += piece.main.shape.numel() if isinstance(piece.moved, CodedMain) else 0
        call = num_decoded // DECODED_NUMEL
        found.setdefault(_Key(piece.source, piece.norm_slot, piece.group, step, call), []).append(index)
    return [_Run(key=key, indices=at, pieces=[pieces[index] for index in at]) for key, at in found.items()]


def _kept(piece: OwnedPiece) -> Iterator[Tensor]:
    yield from piece.state.values()
    yield from piece.main.kept()
