"""The step, from reduced gradients to published parameters, over a tuple of units. Read this file first.

    reduce ─▶ one sweep and one small all-reduce ─▶ verdict: overflow, refusal, errors; the scaler learns
           ─▶ clip coefficient ─▶ one update sweep per unit ─▶ publish what no later unit writes to

No line here knows how parameters are sharded, which rule moves them or in which numbers they are kept.

On an accelerator the host queues all of this and reads nothing: the verdict is a skip flag for the update, scales are
device tensors. Whoever looks at the result waits. One exception: each step looks at the verdict of the step before,
which the device has long reached, so that errors of other ranks are raised one step later at the latest.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from opt_distributed.buffers.binding import UnusableGradientError
from opt_distributed.buffers.wire import CollectiveError
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import Comm
from opt_distributed.step.graphed import GraphedStep
from opt_distributed.step.group_check import GroupCheck, Groups
from opt_distributed.step.hyper import check_rate
from opt_distributed.step.limits import Limits
from opt_distributed.step.quantized import quantized_sources
from opt_distributed.step.result import StepResult
from opt_distributed.step.scaler import Scaler
from opt_distributed.step.spans import Spans, profiler_spans
from opt_distributed.step.stats import (
    Family,
    host_numbers,
    known_numbers,
    moved_parameter,
    reduce_norm,
    reduce_stats,
    reduce_zeros,
)
from opt_distributed.step.unit import Ready, Unit, begin_units_
from opt_distributed.step.verdict import DeviceVerdict, Found, Objections, Terms, Verdict, judge

__all__ = ["Groups", "Limits", "StepResult", "Stepper"]


class _Prepared(NamedTuple):
    """Between `prepare_grads` and `step_with_ready_grads`."""

    verdict: Verdict
    of_units: list[Ready]  # one for each unit
    max_norm: float  # that gradients are clipped to


class Stepper:
    """One step over any layout. Writes parameters, mains, state and the scaler; reads gradients and `groups`."""

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
    ):
        """With `graphs`, `step` is captured and replayed, see `GraphedStep`; GraphError where the device has none."""
        self.units = tuple(units)
        self.families = tuple(families)
        self.everyone = everyone  # all ranks of all units
        self.device = device  # of what travels between them
        self.scaler = scaler
        self.limits = limits
        self.spans = spans
        self.num_begun = 0  # steps since construction, for errors
        self._queues = devices.device_of(device)
        self._applied = sorted({piece.group for unit in self.units for piece in unit.pieces})
        self._ready: _Prepared | None = None
        self._verdict: Verdict | None = None  # of the last step
        self._is_unread = False  # whether its errors may not have been raised
        self._group_check: GroupCheck | None = None
        self._graphed: GraphedStep | None = None
        if graphs:
            self._graphed = GraphedStep(
                units=self.units, families=self.families, everyone=everyone, device=device, scaler=scaler
            )

    def compare_groups(self, groups: Groups) -> None:
        """Lets every step compare the numbers of `groups` between ranks. Collective: all ranks call it together."""
        self._group_check = GroupCheck(
            groups,
            applied=self._applied,
            own={name for unit in self.units for name in getattr(unit.rule, "hyper_names", ())},
            everyone=self.everyone,
        )

    def step(self, groups: Groups) -> StepResult:
        """One step. On an overflow, or a norm above the limit, no byte of any parameter or state changes.

        Raises what `prepare_grads` and `step_with_ready_grads` raise.
        """
        verdict = self._made(groups) if self._graphed is None else self._replayed(self._graphed, groups)
        if verdict.is_own:
            self._looked_at(verdict)  # raises: this rank's own objection need not wait for the next step
        return StepResult.later(lambda: self._result(verdict))

    def prepare_grads(self, groups: Groups) -> bool:
        """Reduces gradients, looks at them once, updates the loss scale. True where they overflowed, on every rank
        alike; on an accelerator the host waits for that.

        Raises:
            CollectiveError: a peer is lost; it names the step and the collective. No weight has changed.
            UnusableGradientError, StorageError, HyperError: on every rank, see `Verdict.found`. No weight has changed.
        """
        return self._looked_at(self._prepare(groups)).overflow

    def step_with_ready_grads(self, groups: Groups) -> bool:
        """Clips, updates, publishes what `prepare_grads` made ready. False where the norm is above the limit.

        Raises:
            RuntimeError: no gradients are ready.
            CollectiveError: a peer was lost while parameters were gathered; it names the step and the collective.
        """
        if self._ready is None or self._ready.verdict.found.overflow:
            raise RuntimeError(
                "no gradients are ready: call prepare_grads first, and go on only where it returns False"
            )
        ready, self._ready = self._ready, None  # an update that raises half-way must not be made a second time
        is_refused = ready.verdict.found.is_refused
        if not is_refused:
            self._update(ready, groups)
        return not is_refused

    @torch.no_grad()
    def publish_set_(self) -> None:
        """Quantises fp8 parameters from main values that were set apart from a step, and publishes all. Collective.

        Raises CollectiveError where a peer is lost.
        """
        sources = [source for unit in self.units for source in quantized_sources(unit.completes)]
        for fp8 in sources:
            fp8.share_extra_()
        if sources:
            for unit in self.units:
                for source in unit.completes:
                    source.publish_()

    def norm(self, norm_type: float) -> float:
        """The `norm_type`-norm of the gradients that `prepare_grads` made ready, unscaled; of slot "", as `grad_norm`.

        Every rank calls it, before `step_with_ready_grads`.

        Raises:
            RuntimeError: no gradients are ready.
            ValueError: `norm_type` is not above 0.
        """
        ready = self._prepared(f"for a {norm_type}-norm")
        norm = reduce_norm(ready.of_units, everyone=self.everyone, norm_type=norm_type, slot=0)
        return norm * ready.verdict.inv_scale

    def clip_to(self, max_norm: float) -> None:
        """Lets the update clip what is ready to `max_norm` in place of the limits'; what these never clip stays so.

        Raises:
            RuntimeError: no gradients are ready.
            ValueError: `max_norm` is not a number from 0 (no clipping) up.
        """
        if not max_norm >= 0:
            raise ValueError(f"clip_grad={max_norm}; give a norm above 0, or 0 for no clipping")
        self._ready = self._prepared("to clip")._replace(max_norm=max_norm)

    def count_zeros(self) -> int:
        """Zero elements of the gradients that are ready, each counted once. Every rank calls it.

        Raises:
            RuntimeError: no gradients are ready.
        """
        ready = self._prepared("to count zeros in")
        if self.limits.count_zeros:
            return ready.verdict.found.num_zeros
        return reduce_zeros(ready.of_units, everyone=self.everyone)

    @property
    def grad_norms_by_group(self) -> dict[str, float]:
        """The last step's gradient norms by slot name; empty before the first, and after one that an error refused."""
        if self._verdict is None:
            return {}
        return dict(zip(self.limits.slots, self._looked_at(self._verdict).norms, strict=True))

    @property
    def grad_norm(self) -> float:
        """The gradient norm of the last step; 0 before the first, and after one that an error refused."""
        return 0.0 if self._verdict is None else self._looked_at(self._verdict).norms[0]

    def _made(self, groups: Groups) -> Verdict:
        verdict = self._prepare(groups)
        ready, self._ready = self._prepared("to update"), None
        if self._queues.is_asynchronous or not (verdict.found.overflow or verdict.found.is_refused):
            self._update(ready, groups)
        return verdict

    @torch.no_grad()
    def _replayed(self, graphed: GraphedStep, groups: Groups) -> Verdict:
        """A step whose work on the device is a graph, except in the first step and where something has changed."""
        self._begin()
        limits, check = self.limits, self._group_check
        with self._naming_the_step():
            refused = self._reduce()
            ready = [unit.ready() for unit in self.units]
            if (id := graphed.lacking(ready)) is not None and refused is None:
                refused = UnusableGradientError(
                    f"{str(id)!r} has no gradient: a step as a graph (optimizer_cuda_graph=True) updates the same "
                    "parameters every time; freeze those that are not used, or turn graphs off"
                )
            objections = Objections(refused, moved_parameter(self.families), check, groups)
            self._check_rates(groups)
            with self.spans("optimizer-inner-step"):
                decided = graphed.step(ready, groups, self._known_numbers(objections), limits, check)
            terms = Terms(len(limits.slots), decided.inv_scale, limits.skip_above)
            verdict = DeviceVerdict(decided, objections, terms, self._queues)
            self._verdict, self._is_unread = verdict, True
            for unit in self.units:
                self._publish(unit)
        return verdict

    def _begin(self) -> None:
        self._raise_what_is_unread()
        self.num_begun += 1
        self._ready = self._verdict = None

    @torch.no_grad()
    def _prepare(self, groups: Groups) -> Verdict:
        """Everything up to the verdict. On a CPU its errors are raised here, else where it is looked at."""
        self._begin()
        inv_scale = 1.0 / self.scaler.factor
        with self._naming_the_step():
            verdict, ready = self._judged(groups, inv_scale)
        self.scaler.update(verdict.overflow, unless=verdict.has_error)
        self._verdict, self._is_unread = verdict, self._queues.is_asynchronous
        self._ready = _Prepared(verdict, self._used(ready), self.limits.max_norm)
        return verdict

    def _judged(self, groups: Groups, inv_scale: float | Tensor) -> tuple[Verdict, list[Ready]]:
        refused = self._reduce()
        with self.spans("optimizer-unscale-and-check-inf"):
            ready = [unit.ready() for unit in self.units]
            objections = Objections(refused, moved_parameter(self.families), self._group_check, groups)
            numbers = reduce_stats(
                self.families,
                ready,
                everyone=self.everyone,
                device=self.device,
                num_slots=len(self.limits.slots),
                count_zeros=self.limits.count_zeros,
                known=self._queues.upload(host_numbers(self._known_numbers(objections))),
                upload=lambda make: self._queues.upload(make()),
            )
            verdict = judge(
                numbers,
                objections,
                Terms(len(self.limits.slots), inv_scale, self.limits.skip_above),
                self._queues,
            )
        return verdict, ready

    def _known_numbers(self, objections: Objections) -> list[float]:
        refused, moved, check, groups = objections
        flags = check.flags(groups) if check is not None else ()
        return known_numbers(refused=refused is not None, moved=moved is not None, flags=flags)

    def _reduce(self) -> UnusableGradientError | None:
        """Returns why this rank's gradients must not be used; the statistics carry that to the other ranks."""
        refused: UnusableGradientError | None = None
        with self.spans("optimizer-copy-to-main-grad"):
            for family in self.families:
                for source in family.sources:
                    try:
                        source.reduce_()
                    except UnusableGradientError as error:
                        refused = refused or error
        return refused

    @torch.no_grad()
    def _update(self, ready: _Prepared, groups: Groups) -> None:
        self._check_rates(groups)
        skip = ready.verdict.skip
        with self.spans("optimizer-clip-main-grad"):
            scales = ready.verdict.scales(ready.max_norm, self.limits.clips)
        with self._naming_the_step():
            begun = begin_units_(
                self.units, ready.of_units, groups, scale_of_slot=scales, skip=skip, device=self.device
            )
            for unit, of_unit, of_hooks in zip(self.units, ready.of_units, begun, strict=True):
                with self.spans("optimizer-inner-step"):
                    unit.update_(of_unit, groups, scale_of_slot=scales, skip=skip, begun=of_hooks)
                self._publish(unit)

    def _check_rates(self, groups: Groups) -> None:
        """Raises before the first update, rather than between the updates of two units."""
        for index in self._applied:
            check_rate(groups[index])

    def _publish(self, unit: Unit) -> None:
        with self.spans("params-all-gather"):
            for source in unit.completes:
                source.publish_()

    def _result(self, verdict: Verdict) -> tuple[bool, float, int | None]:
        found = self._looked_at(verdict)
        zeros = found.num_zeros if self.limits.count_zeros else None
        return not (found.overflow or found.is_refused), found.norms[0], zeros

    def _looked_at(self, verdict: Verdict) -> Found:
        if verdict is not self._verdict:  # of an earlier step: errors of the last one stay unread
            return verdict.found
        self._is_unread = False
        try:
            return verdict.found
        except Exception:
            self._verdict = None  # a step that was refused by an error has no norms
            raise

    def _raise_what_is_unread(self) -> None:
        """The errors of the last step, of which the host has seen nothing."""
        if self._is_unread and self._verdict is not None:
            self._looked_at(self._verdict)

    @contextmanager
    def _naming_the_step(self) -> Iterator[None]:
        try:
            yield
        except CollectiveError as error:
            raise CollectiveError(f"step {self.num_begun}, {error}") from error

    def _used(self, ready: list[Ready]) -> list[Ready]:
        """Without those whose zeros stand for no gradient on any rank."""
        unused = {id for family in self.families for source in family.sources for id in source.unused()}
        return [of_unit.without(unused) for of_unit in ready] if unused else ready

    def _prepared(self, what_for: str) -> _Prepared:
        if self._ready is None:
            raise RuntimeError(f"no gradients are ready {what_for}: ask between prepare_grads and the update")
        return self._ready
