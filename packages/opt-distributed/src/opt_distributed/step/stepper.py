"""`Stepper`: one step, from the reduction of gradients to the publication of parameters. Read this file first.

    reduce ─▶ one sweep and one small all-reduce ─▶ verdict: overflow, refusal, errors; update of the loss scale
           ─▶ clip coefficient ─▶ one update sweep for each unit ─▶ publish buffers that no later unit writes to

Nothing here depends on how parameters are sharded, which rule updates them, or in which dtype they are kept.

On an accelerator the host queues all of this and reads nothing: the verdict is a skip flag for the update, and scales
are device tensors. Reading the result waits for the device. One exception: with several ranks, each step reads the
verdict of the step before, which the device has computed long ago, so that every rank raises the errors of a step in
the next one at the latest. A process without other ranks raises them at once, and waits for nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from opt_distributed.buffers.binding import SparseGradientError, UnusableGradientError
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import Comm
from opt_distributed.step.graphed import GraphedStep
from opt_distributed.step.group_check import GroupCheck, Groups
from opt_distributed.step.group_entries import GroupEntries
from opt_distributed.step.hyper import check_rate
from opt_distributed.step.last_verdict import LastVerdict
from opt_distributed.step.limits import Limits
from opt_distributed.step.numbered import naming_the_step
from opt_distributed.step.peer_sums import PeerSums
from opt_distributed.step.quantized import quantized_sources
from opt_distributed.step.ready import Ready
from opt_distributed.step.result import StepResult
from opt_distributed.step.scaler import Scaler
from opt_distributed.step.spans import Spans, profiler_spans
from opt_distributed.step.stats import (
    Family,
    Known,
    counted_grads,
    known_numbers,
    moved_parameter,
    reduce_norm,
    reduce_stats,
    reduce_zeros,
)
from opt_distributed.step.unit import Unit, begin_units_
from opt_distributed.step.verdict import DeviceVerdict, Objections, Terms, Verdict, verdict_of
from opt_distributed.step.write_check import WriteCheck
from opt_paramgroups import ParamId

__all__ = ["Groups", "Limits", "StepResult", "Stepper"]


class _Prepared(NamedTuple):
    """Between `prepare_grads` and `step_with_ready_grads`."""

    verdict: Verdict
    of_units: list[Ready]  # one for each unit
    max_norm: float  # to which gradients are clipped


class _Present(NamedTuple):
    """What a step finds before it computes anything."""

    ready: list[Ready]  # one for each unit
    moved: ParamId | None  # a parameter that has left the memory that updates write to
    sparse: SparseGradientError | None  # for gradients that were left out


class Stepper:
    """One step over any layout. Writes parameters, main values, state and the scaler; reads gradients and `groups`."""

    def __init__(
        self,
        *,
        units: Sequence[Unit],
        families: Sequence[Family],
        everyone: Comm,
        device: torch.device,
        scaler: Scaler,
        limits: Limits,
        spans: Spans = profiler_spans,
        graphs: bool = False,
        peer_sums: PeerSums | None = None,
    ):
        """With `graphs`, `step` is captured and replayed (`GraphedStep`); raises GraphError if the device has none."""
        self.units = tuple(units)
        self.families = tuple(families)
        self.everyone = everyone  # all ranks of all units
        self.device = device  # of tensors that are sent between them
        self.scaler = scaler
        self.limits = limits
        self.spans = spans
        self.num_begun = 0  # steps since construction, for errors
        self.objection: UnusableGradientError | None = None  # the caller's, for which all ranks refuse the next step
        self.has_written = False  # whether other code has written weights or state on this rank since its last step
        self.write_check: WriteCheck | None = None
        self.peer_sums = peer_sums
        self.empty_slots: frozenset[int] = frozenset()  # norm slots without parameters on any rank
        self._queues = devices.device_of(device)
        self._applied = sorted({piece.group for unit in self.units for piece in unit.pieces})
        self._known = Known(self._queues)
        self._ready: _Prepared | None = None
        self.last = LastVerdict()
        self._group_check: GroupCheck | None = None
        self._entries: GroupEntries | None = None  # of the groups that `compare_groups` was given
        self._graphed: GraphedStep | None = None
        if graphs:
            self._graphed = GraphedStep(
                units=self.units, families=self.families, everyone=everyone, device=device, scaler=scaler
            )

    def compare_groups(self, groups: Groups) -> None:
        """Let every step compare the numbers of `groups` between ranks, and their other entries with the present ones.
        Collective: all ranks call it."""
        rules = {piece.group: unit.rule for unit in self.units for piece in unit.pieces}
        self._entries = GroupEntries(groups, rules)
        self._group_check = GroupCheck(
            groups,
            applied=self._applied,
            own={name for unit in self.units for name in getattr(unit.rule, "hyper_names", ())},
            everyone=self.everyone,
        )

    def accept_loaded(self, groups: Groups) -> None:
        """Accept entries without effect that a load has checked and written to `groups`."""
        if self._entries is not None:
            self._entries.accept_loaded(groups)

    def step(self, groups: Groups) -> StepResult:
        """Make one step. After an overflow, or with a norm above the limit, no parameter or state changes.

        Raises the errors of `prepare_grads` and `step_with_ready_grads`.
        """
        with torch.no_grad():
            verdict = self._made(groups) if self._graphed is None else self._replayed(self._graphed, groups)
        if verdict.is_own and self.everyone.size == 1:
            self.last.read(verdict)  # raises; with other ranks, all of them raise it in the same call
        return StepResult.later(lambda: self._result(verdict))

    @torch.no_grad()
    def prepare_grads(self, groups: Groups) -> bool:
        """Reduce gradients, compute their statistics, update the loss scale. Returns whether they overflowed.

        The result is the same on every rank. On an accelerator the host waits for it.

        Raises:
            CollectiveError: a peer is lost; names the step and the collective. No parameter has changed.
            UnusableGradientError, StorageError, HyperError: on every rank, see `Verdict.findings`. No parameter has
                changed.
        """
        return self.last.read(self._prepare(groups)).overflow

    @torch.no_grad()
    def step_with_ready_grads(self, groups: Groups) -> bool:
        """Clip the gradients, update and publish. Returns False, without an update, if the norm is above the limit.

        Raises:
            RuntimeError: `prepare_grads` was not called before, or returned True.
            CollectiveError: a peer was lost while parameters were gathered; names the step and the collective.
            ValueError: those of `check_groups`.
        """
        if self._ready is None or self._ready.verdict.findings.overflow:
            raise RuntimeError(
                "no gradients are ready: call prepare_grads first, and continue only if it returns False"
            )
        ready, self._ready = self._ready, None  # an update that raises half-way must not be made a second time
        is_refused = ready.verdict.findings.is_refused
        if not is_refused:
            self.check_groups(groups)
            self._update(ready, groups)
        return not is_refused

    @torch.no_grad()
    def publish_set_(self) -> None:
        """Quantise fp8 parameters from main values that were set outside of a step, and publish all. Collective.

        Raises CollectiveError if a peer is lost.
        """
        for unit in self.units:
            for fp8 in quantized_sources(unit.completes):
                fp8.share_extra_()
        for unit in self.units:
            self._publish(unit)

    def norm(self, norm_type: float) -> float:
        """The `norm_type`-norm of the gradients of slot "", without loss scale, as `grad_norm` is for 2.

        Collective: every rank calls it, between `prepare_grads` and `step_with_ready_grads`.

        Raises:
            RuntimeError: no gradients are ready.
            ValueError: `norm_type` is not above 0.
        """
        ready = self._prepared(f"for a {norm_type}-norm")
        norm = reduce_norm(ready.of_units, everyone=self.everyone, norm_type=norm_type, slot=0)
        return norm * ready.verdict.inv_scale

    def counted_grads(self, slot: str = "") -> list[Tensor]:
        """The gradients of this rank's parts that the norm of `slot` counts: fp32, mean, without loss scale.

        Raises:
            RuntimeError: no gradients are ready.
        """
        ready = self._prepared("to read them")
        scale = float(ready.verdict.inv_scale)
        return counted_grads(ready.of_units, slot=self.limits.slots.index(slot), scale=scale)

    def clip_to(self, max_norm: float) -> None:
        """Clip the ready gradients to `max_norm` instead of `limits.max_norm`, in the slots that are clipped.

        Raises:
            RuntimeError: no gradients are ready.
            ValueError: `max_norm` is below 0, which means no clipping, or NaN.
        """
        if not max_norm >= 0:
            raise ValueError(f"clip_grad={max_norm}; pass a norm above 0, or 0 for no clipping")
        self._ready = self._prepared("to clip")._replace(max_norm=max_norm)

    def count_zeros(self) -> int:
        """The number of zero elements in the ready gradients, each counted once. Collective: every rank calls it.

        Raises:
            RuntimeError: no gradients are ready.
        """
        ready = self._prepared("to count zeros in")
        if self.limits.count_zeros:
            return ready.verdict.findings.num_zeros
        return reduce_zeros(ready.of_units, everyone=self.everyone)

    @property
    def grad_norms_by_group(self) -> dict[str, float]:
        """The last step's gradient norms by slot name; empty before the first, and after one that an error refused."""
        if self.last.verdict is None:
            return {}
        norms = zip(self.limits.slots, self.last.read(self.last.verdict).norms, strict=True)
        return {name: 0.0 if slot in self.empty_slots else norm for slot, (name, norm) in enumerate(norms)}

    @property
    def grad_norm(self) -> float:
        """The gradient norm of the last step; 0 before the first, and after one that an error refused."""
        return 0.0 if self.last.verdict is None else self.last.read(self.last.verdict).norms[0]

    def _made(self, groups: Groups) -> Verdict:
        wrong = self._wrong_groups(groups)
        verdict = self._prepare(groups, wrong=wrong)
        ready, self._ready = self._prepared("to update"), None
        if self._queues.is_asynchronous or not (verdict.findings.overflow or verdict.findings.is_refused):
            self._update(ready, groups if wrong is None else self._stand_ins(groups))
        return verdict

    @naming_the_step
    def _replayed(self, graphed: GraphedStep, groups: Groups) -> Verdict:
        """A step whose work on the device is a graph, except at first and after something frozen has changed."""
        self._begin()
        limits, check = self.limits, self._group_check
        wrong = self._wrong_groups(groups)
        refused = self._reduce() or wrong
        ready, moved, sparse = self._look()
        refused = refused or sparse
        if (id := graphed.lacking(ready)) is not None and refused is None:
            refused = UnusableGradientError(
                f"{str(id)!r} has no gradient: a step as a graph (optimizer_cuda_graph=True) updates the same "
                "parameters every time; freeze those that are not used, or turn graphs off"
            )
        objections = Objections(refused, moved, check, groups)
        hypers = groups if wrong is None else self._stand_ins(groups)
        with self.spans("optimizer-inner-step"):
            decided = graphed.step(ready, hypers, self._known_numbers(objections), limits, check)
        terms = Terms(len(limits.slots), decided.inv_scale, limits.skip_above)
        verdict = DeviceVerdict(decided, objections, terms, self._queues)
        self._note(verdict)
        for unit in self.units:
            self._publish(unit)
        return verdict

    def _note(self, verdict: Verdict) -> None:
        # Without other ranks, only an objection of this one can be an error.
        may_raise = verdict.is_own or self.everyone.size > 1
        self.last.set(verdict, step=self.num_begun, is_unread=self._queues.is_asynchronous and may_raise)

    def _begin(self) -> None:
        before = self.last.verdict
        sums = self.last.forget()
        if before is not None and self.write_check is not None and self._queues.is_asynchronous:
            self.write_check.check((sums or before.check()).flags)  # of that step, of which the host knows now
        self.num_begun += 1
        self._ready = None

    def _prepare(self, groups: Groups, *, wrong: ValueError | None = None) -> Verdict:
        """Everything up to the verdict. On a CPU its errors are raised here, else when it is read.

        `wrong` is the reason why this rank's groups cannot be used.
        """
        self._begin()
        inv_scale = self.scaler.inverse
        verdict, ready = self._judged(groups, inv_scale, wrong)
        if self.write_check is not None and not self._queues.is_asynchronous:
            self.write_check.check(verdict.check().flags)
        self.scaler.update(verdict.overflow, unless=verdict.has_error)
        self._note(verdict)
        self._ready = _Prepared(verdict, self._used(ready), self.limits.max_norm)
        return verdict

    @naming_the_step
    def _judged(
        self, groups: Groups, inv_scale: float | Tensor, wrong: ValueError | None
    ) -> tuple[Verdict, list[Ready]]:
        refused = self._reduce() or wrong
        with self.spans("optimizer-unscale-and-check-inf"):
            ready, moved, sparse = self._look()
            objections = Objections(refused or sparse, moved, self._group_check, groups)
            numbers = reduce_stats(
                self.families,
                ready,
                everyone=self.everyone,
                device=self.device,
                num_slots=len(self.limits.slots),
                count_zeros=self.limits.count_zeros,
                known=self._known.write_(self._known_numbers(objections)),
                upload=lambda make: self._queues.upload(make()),
            )
            return verdict_of(numbers, objections, inv_scale, self.limits, self._queues), ready

    def _look(self) -> "_Present":
        """Read the gradients, and look where parameters are."""
        ready = [unit.ready(unit.read_grads()) for unit in self.units]
        errors = [error for unit in self.units if (error := unit.take_error()) is not None]
        return _Present(ready, moved_parameter(self.families), errors[0] if errors else None)

    def _known_numbers(self, objections: Objections) -> list[float]:
        refused, moved, check, groups = objections
        flags = check.flags(groups) if check is not None else []
        if self.write_check is not None:
            flags += self.write_check.flags(has_written=self.has_written)
        return known_numbers(refused=refused is not None, moved=moved is not None, flags=flags)

    def _reduce(self) -> UnusableGradientError | None:
        """Return why this rank's gradients must not be used, if so. The statistics report that to the other ranks."""
        refused, self.objection = self.objection, None
        with self.spans("optimizer-copy-to-main-grad"):
            for family in self.families:
                for source in family.sources:
                    try:
                        source.reduce_()
                    except UnusableGradientError as error:
                        refused = refused or error
            if self.peer_sums is not None:
                self.peer_sums.add_()
        return refused

    @naming_the_step
    def _update(self, ready: _Prepared, groups: Groups) -> None:
        verdict = ready.verdict
        with self.spans("optimizer-clip-main-grad"):
            scales = verdict.scales(ready.max_norm, self.limits.clips)
        begun = begin_units_(
            self.units, ready.of_units, groups, scale_of_slot=scales, skip=verdict.skip, device=self.device
        )
        for unit, of_unit, of_hooks in zip(self.units, ready.of_units, begun, strict=True):
            with self.spans("optimizer-inner-step"):
                unit.update_(
                    of_unit,
                    groups,
                    scale_of_slot=scales,
                    skip=verdict.skip,
                    begun=of_hooks,
                )
            self._publish(unit)

    def check_groups(self, groups: Groups) -> None:
        """Raise before the first update rather than between the updates of two units.

        Raises:
            ValueError: a group has no learning rate yet.
            GroupError: an entry of a group was changed in a way that no step supports.
        """
        if self._entries is not None:
            self._entries.check(groups)
        for index in self._applied:
            check_rate(groups[index])

    def _wrong_groups(self, groups: Groups) -> ValueError | None:
        """Return the error of `check_groups`, which the statistics report to the other ranks."""
        try:
            self.check_groups(groups)
        except ValueError as error:
            return error
        return None

    def _stand_ins(self, groups: Groups) -> Groups:
        """Groups for an update that the verdict skips, so that this rank joins the collectives of the others."""
        found = groups if self._entries is None else self._entries.as_built(groups)
        return [{**group, "lr": 0.0} if group["lr"] is None else group for group in found]

    def _publish(self, unit: Unit) -> None:
        with self.spans("params-all-gather"):
            for source in unit.completes:
                source.publish_()

    def _result(self, verdict: Verdict) -> tuple[bool, float, int | None]:
        findings = self.last.read(verdict)
        zeros = findings.num_zeros if self.limits.count_zeros else None
        return not (findings.overflow or findings.is_refused), findings.norms[0], zeros

    def _used(self, ready: list[Ready]) -> list[Ready]:
        """Drop pieces whose gradients are zeros because no rank has a gradient of the parameter."""
        unused = {id for family in self.families for source in family.sources for id in source.unused()}
        return [of_unit.without(unused) for of_unit in ready] if unused else ready

    def _prepared(self, purpose: str) -> _Prepared:
        if self._ready is None:
            raise RuntimeError(f"no gradients are ready {purpose}: call it between prepare_grads and the update")
        return self._ready
