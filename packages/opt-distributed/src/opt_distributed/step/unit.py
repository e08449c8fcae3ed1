"""`Unit`: one rule, and the pieces of parameters on this rank that it updates."""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opt_distributed.step.clip import times
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
from opt_distributed.step.short_main import DecodedMain
from opt_distributed.step.sources import ReadGrads, Source
from opt_kernels.backends.triton.kept_works import KeptWorks, is_launched
from opt_kernels.hooks import HookedUpdate
from opt_kernels.rules.base import Needs, Rule
from opt_kernels.works import Batch, MatrixSpec, Works
from opt_paramgroups import ParamId

DECODED_NUMEL = 1 << 25
"""Elements of coded mains (128 MiB decoded) after which the piece that exceeds them ends a call of the rule."""


@dataclass(slots=True)
class Touched:
    """What was done to the pieces of a unit outside of its updates."""

    states: bool = False  # other code has had access to main values or state, and may move them at any time
    counts: int = 0  # how often pieces were given another count of updates


@dataclass(slots=True, kw_only=True)
class OwnedPiece:
    """The part of one parameter that this rank owns: gradient source, main values and state.

    Outside of the unit, read `main` and `state`, which let the unit check in every later step where these are.
    """

    id: ParamId
    param: nn.Parameter
    of_param: slice  # flat elements of the (local) parameter
    group: int  # index in `param_groups`
    source: Source  # of its gradient
    own_main: Main | DecodedMain | HostMain | QuantizedMain
    own_state: dict[str, Tensor]
    norm_slot: int = 0  # the gradient norm of the step to which it contributes
    counted: bool = True  # False if another rank counts these elements in norms and zeros
    inspected: bool = True  # whether this rank checks the gradient for infinities and NaNs; true if it counts
    matrix: MatrixSpec = field(default_factory=MatrixSpec)
    replica: int | None = None  # its replica number, if data-parallel ranks do not hold the same parts
    part: str = ""  # names this rank's part of a plain parameter that is cut over tensor-parallel ranks
    stage: ComputeStage | None = None  # gathers it with the other ranks' parts of the same matrix
    count: StepCount = field(
        default_factory=StepCount
    )  # of updates; shared with pieces that are always updated with it
    touched: Touched = field(default_factory=Touched)  # shared with all pieces of the unit

    @property
    def main(self) -> Main | DecodedMain | HostMain | QuantizedMain:
        """The main values."""
        self.touched.states = True
        return self.own_main

    @property
    def state(self) -> dict[str, Tensor]:
        """The rule's state, by name."""
        self.touched.states = True
        return self.own_state

    @property
    def moved(self) -> Main | DecodedMain | QuantizedMain:
        """The main values that the rule updates: those in host memory if the unit is there."""
        return self.own_main.moved if isinstance(self.own_main, HostMain) else self.own_main

    @property
    def step(self) -> int:
        """The number of updates made so far. On an accelerator the host waits for it."""
        return int(self.count)

    @step.setter
    def step(self, value: int) -> None:
        self.take_count(StepCount(value))

    def take_count(self, count: StepCount) -> None:
        """Count updates with `count` from now on."""
        self.count = count
        self.touched.counts += 1

    @property
    def is_whole(self) -> bool:
        """Whether it is everything that this rank stores of the parameter."""
        return self.of_param == slice(0, local_numel(self.param))


class Kind(NamedTuple):
    """What the statistics must know of a piece; see `OwnedPiece`."""

    source: Source
    norm_slot: int
    counted: bool
    inspected: bool


Kinds = Mapping[Kind, Sequence[int]]
"""Pieces by kind, as places among them."""


class Ready(NamedTuple):
    """The pieces of a unit that have gradients, and these gradients, in the same order.

    Two lists instead of pairs: with thousands of small parameters, creating objects takes most of a step's time.
    """

    pieces: Sequence[OwnedPiece]
    grads: Sequence[Tensor]
    kinds: "Kinds | None" = None  # of the pieces, if they are known

    def without(self, unused: Collection[ParamId]) -> "Ready":
        """Drop the pieces of these parameters."""
        kept = [(p, g) for p, g in zip(self.pieces, self.grads, strict=True) if p.id not in unused]
        return Ready([p for p, _ in kept], [g for _, g in kept])


@dataclass(slots=True, kw_only=True)
class Unit:
    """One rule, and the pieces on this rank that it updates. A rank that owns nothing has no pieces."""

    name: str
    rule: Rule
    pieces: Sequence[OwnedPiece]
    completes: Sequence[Source] = ()  # sources to which no later unit of the step writes, on any rank
    stages: Sequence[ComputeStage] = ()  # of pieces that are parts of matrices; in the same order on all ranks
    cut: Sequence[CutParams] = ()  # parameters of which other ranks own parts, if hooks read norms
    cut_rows: Sequence[CutRows] = ()  # parameters whose rows span ranks, if hooks read rows of gradients
    host: HostSide | None = None  # if state is in host memory: copies gradients there, and parameters back
    _read_grads: ReadGrads = field(init=False)  # of all pieces
    _kinds: Kinds = field(init=False)  # of all pieces
    _touched: Touched = field(init=False)
    _runs: list["_Run"] = field(init=False, default_factory=list)  # of all pieces
    _num_counts: int = field(init=False, default=-1)  # `_touched.counts` when these were made
    _memory: list[Tensor] = field(init=False, default_factory=list)  # cache of `memory`, valid for `_runs`

    def __post_init__(self) -> None:
        self._read_grads = _reader(self.pieces)
        self._kinds = kinds_of(self.pieces)
        self._touched = Touched(states=any(piece.touched.states for piece in self.pieces))
        for piece in self.pieces:
            piece.touched = self._touched

    def ready(self) -> Ready:
        """The pieces that have a gradient in this step, before it is known whether any rank used the parameter."""
        found = self._read_grads()
        grads = [grad for grad in found if grad is not None]
        if len(grads) == len(found):
            return Ready(self.pieces, grads, self._kinds)
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
        """The runs that each call of the rule updates.

        Coded mains are decoded during a call, so each of their runs has its own call to save memory. Not if ranks
        compute matrices together: their collectives must not depend on the coded mains of one rank.
        """
        if self.stages or not any(run.is_decoded for run in runs):
            return [runs]
        return [[run] for run in runs]

    def _runs_by_scale(self, ready: Ready, scale_of_slot: Sequence[float | Tensor]) -> list["_Scaled"]:
        """Group runs by the scale of their gradients."""
        found: dict[Hashable, _Scaled] = {}
        for run in self._runs_of(ready.pieces):
            slot, by = run.key.norm_slot, run.key.source.grad_scale
            scale = scale_of_slot[slot]
            # Whether two tensors have the same value is unknown to the host.
            key = (slot, by) if isinstance(scale, Tensor) else scale * by
            if key not in found:
                found[key] = _Scaled(times(scale, by) if isinstance(scale, Tensor) else scale * by, [])
            found[key].runs.append(run)
        return list(found.values())

    def _batches(self, runs: Sequence["_Run"], ready: Ready, groups: Sequence[Mapping[str, Any]]) -> list[Batch]:
        batches = []
        for run in runs:
            works = run.works(ready.grads, states_may_change=self._touched.states)
            hyper = read_hyper(groups[run.key.group], step=run.count.next(), own=getattr(self.rule, "hyper_names", ()))
            # Matrix rules iterate over works more than once; elementwise ones may never create a `Work`.
            iterates = self.rule.needs is Needs.MATRICES and works.unchanged is None
            batches.append(Batch(hyper, list(works) if iterates else works))
        return batches

    def _runs_of(self, pieces: Sequence[OwnedPiece]) -> list["_Run"]:
        """The runs of these pieces. Those of all pieces are cached while their pieces are always updated together."""
        if pieces is not self.pieces:
            return _runs(pieces, self.rule)
        if not self._runs or self._num_counts != self._touched.counts or _may_join(self._runs):
            self._runs = _runs(pieces, self.rule)
            self._num_counts = self._touched.counts
            self._memory = []
        return self._runs

    def counts(self, ready: Ready) -> list[StepCount]:
        """The counts of updates of these pieces, one for each run."""
        return [run.count for run in self._runs_of(ready.pieces)]

    @property
    def memory(self) -> Sequence[Tensor]:
        """All tensors that an update of all pieces writes."""
        if not self._memory:
            self._memory = [tensor for piece in self.pieces for tensor in (piece.own_main.target, *_kept(piece))]
        return self._memory

    def fresh_state(self, piece: OwnedPiece) -> dict[str, Tensor]:
        """The state of one of its pieces before the first step."""
        return init_state(self.rule, piece.own_main.value(), id=piece.id, matrix=piece.matrix, stage=piece.stage)

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
    held = [Held(unit.cut_rows, of_unit.pieces, of_unit.grads) for unit, of_unit in zip(units, ready, strict=True)]
    means = means_over_ranks(held, device=device)
    begun = [
        unit.begin_(of_unit, groups, scale_of_slot=scale_of_slot, skip=skip, row_means=means)
        for unit, of_unit in zip(units, ready, strict=True)
    ]
    add_over_ranks_(begun, device=device)
    return begun


def kinds_of(pieces: Sequence[OwnedPiece]) -> Kinds:
    """The kinds of these pieces."""
    found: dict[Kind, list[int]] = {}
    for place, piece in enumerate(pieces):
        kind = Kind(piece.source, piece.norm_slot, piece.counted, piece.inspected)
        found.setdefault(kind, []).append(place)
    return found


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
    runs: list["_Run"]


class _Key(NamedTuple):
    """Pieces with equal keys share a row of hyper-parameters and the scale of their gradients."""

    source: Source
    norm_slot: int
    group: int
    step: int | StepCount  # updates made so far, or the count itself if only the device knows the number
    call: int = 0  # number of the call in which coded mains are decoded


@dataclass(slots=True, kw_only=True)
class _Run:
    """Pieces with one key, in order. Stored by columns, so that a step creates no object for each piece."""

    key: _Key
    indices: Sequence[int]  # among the pieces that were ready
    pieces: Sequence[OwnedPiece]
    rule: Rule  # that updates them
    count: StepCount = field(init=False)  # shared by its pieces from now on
    opened: Sequence[DecodedMain | QuantizedMain] = ()  # mains that must be stored after an update
    columns: Works = field(init=False)  # without gradients
    kept: KeptWorks = field(init=False)

    def __post_init__(self) -> None:
        self.count = self.pieces[0].count.copy()
        for piece in self.pieces:
            piece.take_count(self.count)
        mains = [piece.moved for piece in self.pieces]
        self.opened = [main for main in mains if isinstance(main, DecodedMain | QuantizedMain)]
        self.columns = Works(
            (),
            mains=_column([main.main for main in mains]),
            states=[piece.own_state for piece in self.pieces],
            outs=_column([main.out for main in mains]),
            remainders=_column([main.remainder for main in mains]),
            matrices=[piece.matrix for piece in self.pieces],
        )
        self.kept = KeptWorks(
            lambda: self.columns,
            positions=self.indices,
            params=[main.target for main in mains],
            states=self.columns.states,
            mains=[tensor for main in mains for tensor in main.kept()],
            is_possible=is_launched(self.rule, mains[0].target.device) and not self.opened,
        )

    def works(self, grads: Sequence[Tensor], *, states_may_change: bool) -> Works:
        """The works of the run, given the gradients of all ready pieces. Opens mains until `close_`."""
        if not self.kept.hold(grads, states_may_change=states_may_change):
            self.kept.begin(grads, states_may_change=states_may_change)
        kept, of = self.kept.works(grads), self.columns
        if kept is not None:
            return kept
        return Works(
            [grads[index] for index in self.indices],
            mains=[main.open_() for main in self.opened] if self.opened else of.mains,
            states=of.states,
            outs=of.outs,
            remainders=of.remainders,
            matrices=of.matrices,
        )

    def close_(self, *, skip: Tensor | None) -> None:
        """Store the mains that `works` opened."""
        for main in self.opened:
            main.close_(skip=skip)

    @property
    def is_decoded(self) -> bool:
        """Whether its mains use additional memory while they are open."""
        return any(isinstance(main, DecodedMain) for main in self.opened)


def _may_join(runs: Sequence[_Run]) -> bool:
    """Whether two runs now have equal keys, because their numbers of updates have become equal."""
    keys = {run.key._replace(step=run.count if run.count.known is None else run.count.known) for run in runs}
    return len(keys) < len(runs)


def _column(values: Sequence[Tensor | None]) -> list[Tensor] | None:
    """The values, or None if all are None. Pieces of one source and rule have the same kind of main values."""
    found = [value for value in values if value is not None]
    assert len(found) in (0, len(values))
    return found or None


def _runs(pieces: Sequence[OwnedPiece], rule: Rule) -> list[_Run]:
    """Group pieces by key, in order: the same groups on every rank with the same pieces."""
    found: dict[_Key, list[int]] = {}
    num_decoded = 0
    for index, piece in enumerate(pieces):
        step = piece.count if piece.count.known is None else piece.count.known
        num_decoded += piece.own_main.shape.numel() if isinstance(piece.moved, DecodedMain) else 0
        call = num_decoded // DECODED_NUMEL
        found.setdefault(_Key(piece.source, piece.norm_slot, piece.group, step, call), []).append(index)
    return [_Run(key=key, indices=at, pieces=[pieces[index] for index in at], rule=rule) for key, at in found.items()]


def _kept(piece: OwnedPiece) -> Iterator[Tensor]:
    yield from piece.own_state.values()
    yield from piece.own_main.kept()
