"""`Stepper`: one step, from the reduction of gradients to the publication of parameters. Read this file first.

    reduce ─▶ flags of the guards ─▶ one pass over the gradients, one small all-reduce
           ─▶ verdict: overflow, refusal, errors; loss scale ─▶ clip coefficient
           ─▶ one pass of updates for each unit ─▶ publish buffers that no later unit writes to

A *piece* is the part of a parameter that this rank updates. A *unit* is one rule with its pieces. A *source* has the
gradients of one buffer, and publishes its parameters: sends new values to the ranks that hold them. A *family* is the
sources that are reduced over one set of ranks: dense parameters, or experts. A norm *slot* is one of several gradient
norms; slot "" is the model's own.

Nothing here depends on how parameters are sharded, which rule updates them, or in which dtype they are kept. Reasons
for which all ranks refuse a step are guards (`step.guards`): a list of which the stepper knows nothing else.

On an accelerator the host queues all of this and reads nothing: the verdict is a skip flag for the update, and scales
are device tensors. Reading the result waits for the device. One exception: with several ranks, each step reads the
outcome of the step before, which the device has computed long ago, so that every rank raises the errors of a step in
the next one at the latest. A process without other ranks raises them at once, and waits for nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from opt_distributed.buffers.main_grad import UnusableGradientError
from opt_distributed.buffers.wires import CollectiveError
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import ALONE, Comm
from opt_distributed.pieces.piece import Groups, Ready, Update
from opt_distributed.pieces.quantized import QuantizedSource
from opt_distributed.pieces.sources import PeerSums
from opt_distributed.step.capture import CapturedStep
from opt_distributed.step.guards.groups import EqualGroups, UsableGroups, check_second_half
from opt_distributed.step.guards.guard import Guard, GuardError, Inputs, ParamsInPlace, UsableGrads, agreed_guards
from opt_distributed.step.scaler import Scaler
from opt_distributed.step.spans import Spans, profiler_spans
from opt_distributed.step.stats import (
    Family,
    HostNumbers,
    counted_grads,
    host_flags,
    reduce_norm,
    reduce_stats,
    reduce_zeros,
    used,
)
from opt_distributed.step.tensor_stats import Watch
from opt_distributed.step.unit import Unit, begin_units_
from opt_distributed.step.verdict import Limits, Outcome, Report, StepResult, Verdict, decide, warn_of_deleted

__all__ = ["Groups", "Limits", "StepResult", "Stepper"]


class _Prepared(NamedTuple):
    """The gradients between `prepare_grads` and `step_with_ready_grads`."""

    verdict: Verdict
    ready: Sequence[Ready]  # one for each unit
    max_norm: float  # to which gradients are clipped


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
        instances: Comm = ALONE,
    ):
        """With `graphs`, `step` is captured and replayed (`CapturedStep`); raises GraphError if the device has none."""
        self.units, self.families = tuple(units), tuple(families)
        self.everyone = everyone  # all ranks of all units, of one optimizer instance
        self.instances = instances  # the ranks in the place of this rank in all instances
        self._has_others = everyone.size > 1 or instances.size > 1
        self.device = device  # of tensors that are sent between them
        self.scaler, self.limits, self.spans, self.peer_sums = scaler, limits, spans, peer_sums
        self.num_begun = 0  # steps since construction, for errors
        self.empty_slots: frozenset[int] = frozenset()  # norm slots without parameters on any rank
        self.last: Outcome | None = None  # of the last step; None before the first, and after one that an error refused
        self.inputs = Inputs()
        self._sources = [source for family in families for source in family.sources]
        rules = {piece.group: unit.rule for unit in units for piece in unit.pieces}
        self._local_rules = dict(sorted(rules.items()))  # by the indices of this rank's groups
        self.usable_groups = UsableGroups(self.inputs, self._local_rules)
        self._usable_grads = UsableGrads(self.inputs)
        # Equal on every rank, and fixed when the first step begins.
        self.guards: list[Guard] = [self._usable_grads, self.usable_groups, ParamsInPlace(self._sources)]
        self._guards: tuple[Guard, ...] = ()  # those of the first step
        self._equal: EqualGroups | None = None  # among them
        # Called when a step begins, with the outcome of the step before, also of one that an error refused. Collective.
        self.at_start: list[Callable[[Outcome | None], None]] = []
        self._before: Outcome | None = None
        self._accelerator = devices.device_of(device)
        self._flags = HostNumbers(self._accelerator)
        self._prepared: _Prepared | None = None
        self.watch: Watch | None = None
        self._captured = CapturedStep(self.units, self._sources, scaler=scaler, device=device) if graphs else None
        warn_of_deleted()

    def compare_groups(self, groups: Groups) -> None:
        """Let every step compare the numbers of `groups` between ranks, and their other entries with the present ones.
        Collective: all ranks call it."""
        self.usable_groups.compare(groups)
        own = {name for unit in self.units for name in getattr(unit.rule, "hyper_names", ())}
        peers = self.everyone if self.everyone.size > 1 else self.instances  # instances of one rank each
        self._equal = EqualGroups(self.inputs, groups, local=self._local_rules, own=own, everyone=peers)
        if self._equal.num_flags:
            self.guards.append(self._equal)

    @torch.no_grad()
    def step(self, groups: Groups) -> StepResult:
        """Make one step. After an overflow, or with a norm above the limit, no parameter or state changes.

        Raises the errors of `prepare_grads` and `step_with_ready_grads`.
        """
        with self._naming_the_step():
            ready, flags = self._begin(groups)
            if self._captured is None:
                prepared = self._decide(ready, flags)
                # On a CPU, the errors of guards are raised here. A device skips updates by the verdict. A guard that
                # refuses the groups has replaced them in `inputs`, so that this rank can join collectives.
                success = self._accelerator.is_asynchronous or self._read().success
                with self._watched(prepared.ready, prepared.verdict.inv_scale, prepared.max_norm, skipped=not success):
                    if success:
                        self._update_(prepared, self.inputs.groups, then=self._publish)
            else:
                with self._watched(ready, self.scaler.inverse, self.limits.max_norm):
                    self._replay_(self._captured, ready, flags)
        outcome = self._outcome()
        if not self._has_others and any(flags):
            self._read()  # a rank alone knows its flags without waiting; others raise, all of them, in the same call
        return StepResult.later(lambda: self._values(outcome))

    @torch.no_grad()
    def prepare_grads(self, groups: Groups) -> bool:
        """Reduce gradients, compute their statistics, update the loss scale. Returns whether they overflowed.

        The result is the same on every rank. On an accelerator the host waits for it.

        Raises:
            CollectiveError: a peer is lost; names the step and the collective. No parameter has changed.
            UnusableGradientError, StorageError, HyperError, ValueError, ReplicaError: on every rank, from the first
                guard that refuses the step. No parameter has changed.
        """
        with self._naming_the_step():
            self._prepared = prepared = self._decide(*self._begin(groups))
            if overflow := self._read().overflow:
                with self._watched(prepared.ready, prepared.verdict.inv_scale, prepared.max_norm, skipped=True):
                    pass
            return overflow

    @torch.no_grad()
    def step_with_ready_grads(self, groups: Groups) -> bool:
        """Clip the gradients, update and publish. Returns False, without an update, if the norm is above the limit.

        Raises:
            RuntimeError: `prepare_grads` was not called before, or returned True.
            CollectiveError: a peer was lost while parameters were gathered; names the step and the collective.
            ValueError: on every rank, those of `UsableGroups.check`; numbers of a group, or the norms of `clip_to`,
                differ between ranks. No parameter has changed.
        """
        if self._prepared is None or self._read().overflow:
            raise RuntimeError(
                "no gradients are ready: call prepare_grads first, and continue only if it returns False"
            )
        prepared, self._prepared = self._prepared, None  # an update that raises half-way must not be made again
        success = self._read().success
        with self._naming_the_step():
            if success:
                ranks = (self.everyone, self.instances)
                check_second_half(groups, prepared.max_norm, usable=self.usable_groups, equal=self._equal, ranks=ranks)
            with self._watched(prepared.ready, prepared.verdict.inv_scale, prepared.max_norm, skipped=not success):
                if success:
                    self._update_(prepared, groups, then=self._publish)
        return success

    # --- a step, part by part ---------------------------------------------------------------------------------------

    def _begin(self, groups: Groups) -> tuple[list[Ready], list[float]]:
        """Reduce and read the gradients, for each unit, and ask the guards for their flags.

        Raises the errors of the step before, if nobody has read them.
        """
        before, self._before, self.last, self._prepared = self._before, None, None, None
        for check in self.at_start:
            check(before)
        if before is not None and before.is_unread:
            before.read()
        self.num_begun += 1
        self._guards = self._guards or agreed_guards(self.guards, self.everyone, self.instances)
        self.inputs.groups, self.inputs.refused = groups, None
        self._reduce_()
        ready = [unit.ready(self._refuse) for unit in self.units]
        if self._captured is not None:
            self._refuse(self._captured.lacking(ready))
        return ready, self._ask_guards()

    def _reduce_(self) -> None:
        """Complete the reductions. A rank that refuses its gradients joins all of them."""
        with self.spans("optimizer-copy-to-main-grad"):
            for source in self._sources:
                try:
                    source.reduce_()
                except UnusableGradientError as error:
                    self._refuse(error)
            if self.peer_sums is not None:
                self.peer_sums.add_()

    def _ask_guards(self) -> list[float]:
        """Return the flags of all guards: as many in every step, and on every rank."""
        if tuple(self.guards) != self._guards:
            self._refuse(GuardError("guards were changed after the first step; append them before, on every rank"))
        flags = [self._ask(guard) for guard in self._guards]
        at = self._guards.index(self._usable_grads)
        flags[at] = self._ask(self._usable_grads)  # once more, because it tells of guards that failed
        return [flag for of_guard in flags for flag in of_guard]

    def _ask(self, guard: Guard) -> list[float]:
        """Return this rank's flags; zeros if the guard fails, for which every rank refuses the step."""
        try:
            flags = list(guard.flags())
            if len(flags) != guard.num_flags:
                raise GuardError(f"{type(guard).__name__} has {len(flags)} flags, but num_flags={guard.num_flags}")
        except Exception as error:
            self._refuse(error.with_traceback(None))  # its frames may keep parameters alive
            return [0.0] * guard.num_flags
        return flags

    def _refuse(self, error: Exception | None) -> None:
        self.inputs.refused = self.inputs.refused or error

    def _decide(self, ready: Sequence[Ready], flags: list[float]) -> _Prepared:
        """Everything up to the verdict. On a CPU its errors are raised here, else when it is read."""
        with self.spans("optimizer-unscale-and-check-inf"):
            verdict = self._judge(ready, self._on_device(flags))
        self._note(verdict, flags)
        if self._accelerator.is_asynchronous:
            self.scaler.update(verdict.overflow, unless=verdict.is_wrong)
        else:
            self.scaler.update(self._read().overflow)
        return _Prepared(verdict, used(self.families, ready), self.limits.max_norm)

    def _on_device(self, flags: list[float]) -> Tensor:
        """The flags of the guards, then those of the sources."""
        return self._flags.write_([*flags, *host_flags(self.families)])

    def _judge(self, ready: Sequence[Ready], flags: Tensor) -> Verdict:
        """Sum the statistics of all ranks in one small all-reduce, and decide. The host reads nothing."""
        inv_scale = self.scaler.inverse
        ranks = {"everyone": self.everyone, "instances": self.instances}
        numbers = reduce_stats(self.families, ready, flags, self.limits, device=self.device, **ranks)
        return decide(numbers, self._guards, inv_scale=inv_scale, limits=self.limits)

    def _update_(self, prepared: _Prepared, groups: Groups, *, then: Callable[[Unit], None] | None = None) -> None:
        """Clip, and update each unit; then call `then` with it."""
        verdict, ready, max_norm = prepared
        with self.spans("optimizer-clip-main-grad"):
            scales: Sequence[float | Tensor] = verdict.scales(max_norm, self.limits.clips)
        skip: Tensor | None = verdict.skip
        if not self._accelerator.is_asynchronous:
            scales, skip = [float(scale) for scale in scales], None
        updates = [Update(of_unit, groups, scales, skip) for of_unit in ready]
        begun = begin_units_(self.units, updates, device=self.device)
        for unit, update, of_hooks in zip(self.units, updates, begun, strict=True):
            with self.spans("optimizer-inner-step"):
                unit.update_(update, of_hooks)
            if then is not None:
                then(unit)

    def _replay_(self, captured: CapturedStep, ready: Sequence[Ready], flags: list[float]) -> None:
        """A step whose work on the device is a graph, except at first and after something frozen has changed."""

        def work(ready: Sequence[Ready], flags: Tensor, groups: Groups) -> Verdict:
            verdict = self._judge(ready, flags)
            self.scaler.update(verdict.overflow, unless=verdict.is_wrong)
            self._update_(_Prepared(verdict, ready, self.limits.max_norm), groups)
            return verdict

        with self.spans("optimizer-inner-step"):
            verdict = captured.step(work, ready, self._on_device(flags), self.inputs.groups, self.limits)
        self._note(verdict, flags)
        for unit in self.units:
            self._publish(unit)

    def _publish(self, unit: Unit) -> None:
        with self.spans("params-all-gather"):
            for source in unit.completes:
                source.publish_()

    @contextmanager
    def _watched(
        self, ready: Sequence[Ready], inverse: float | Tensor, max_norm: float, *, skipped: bool = False
    ) -> Iterator[None]:
        if self.watch is not None:
            self.watch.before(ready, inverse, skipped=skipped)
        yield
        if self.watch is not None:
            self.watch.after(self._outcome(), max_norm=max_norm)

    @contextmanager
    def _naming_the_step(self) -> Iterator[None]:
        try:
            yield
        except CollectiveError as error:
            raise CollectiveError(f"step {self.num_begun}, {error}") from error
        finally:
            self.inputs.groups = ()  # an outcome that nobody reads keeps the guards, but must keep no parameter alive

    # --- its outcome ------------------------------------------------------------------------------------------------

    def _note(self, verdict: Verdict, flags: list[float]) -> None:
        # Without other ranks, only this one's flags can be an error, which `step` reads.
        is_unread = self._accelerator.is_asynchronous and (self._has_others or any(flags))
        outcome = Outcome(verdict, self._guards, self.num_begun, self._accelerator, owner=self, is_unread=is_unread)
        self.last = self._before = outcome

    def _outcome(self) -> Outcome:
        assert self.last is not None
        return self.last

    def _read(self, outcome: Outcome | None = None) -> Report:
        """Read the outcome of this or an earlier step, for which the host waits. Raises its errors."""
        outcome = self._outcome() if outcome is None else outcome
        try:
            return outcome.read()
        except Exception as error:
            if self.watch is not None and outcome is self.last and not self._accelerator.is_asynchronous:
                self.watch.refused(error)
            raise
        finally:
            if outcome.was_refused and outcome is self.last:
                self.last = self._prepared = None  # such a step has no norms

    def _values(self, outcome: Outcome) -> tuple[bool, float, int | None]:
        report = self._read(outcome)
        return report.success, report.norms[0], report.num_zeros if self.limits.count_zeros else None

    def warn_of_unread(self, when: str) -> None:
        """Warn once if an error refused the last step and nobody has read it; the next step still raises it."""
        warn_of_deleted()
        if self.last is not None:
            self.last.warn(when)

    @property
    def grad_norms_by_group(self) -> dict[str, float]:
        """The last step's gradient norms by slot name; empty before the first, and after one that an error refused."""
        if self.last is None:
            return {}
        norms = zip(self.limits.slots, self._read().norms, strict=True)
        return {name: 0.0 if slot in self.empty_slots else norm for slot, (name, norm) in enumerate(norms)}

    @property
    def grad_norm(self) -> float:
        """The gradient norm of the last step; 0 before the first, and after one that an error refused."""
        return 0.0 if self.last is None else self._read().norms[0]

    # --- between the halves of a step -------------------------------------------------------------------------------

    def norm(self, norm_type: float) -> float:
        """The `norm_type`-norm of the gradients of slot "", without loss scale, as `grad_norm` is for 2.

        Collective: every rank calls it, between `prepare_grads` and `step_with_ready_grads`.

        Raises:
            RuntimeError: no gradients are ready.
            ValueError: `norm_type` is not above 0.
        """
        prepared = self._present(f"for a {norm_type}-norm")
        norm = reduce_norm(prepared.ready, everyone=self.everyone, norm_type=norm_type, slot=0)
        return norm * float(prepared.verdict.inv_scale)

    def counted_grads(self, slot: str = "") -> list[Tensor]:
        """The gradients of this rank's parts that the norm of `slot` counts: fp32, mean, without loss scale.

        Raises:
            RuntimeError: no gradients are ready.
        """
        prepared = self._present("to read them")
        scale = float(prepared.verdict.inv_scale)
        return counted_grads(prepared.ready, slot=self.limits.slots.index(slot), scale=scale)

    def clip_to(self, max_norm: float) -> None:
        """Clip the ready gradients to `max_norm` instead of `limits.max_norm`, in the slots that are clipped.

        Raises:
            RuntimeError: no gradients are ready.
            ValueError: `max_norm` is below 0, which means no clipping, or NaN.
        """
        if not max_norm >= 0:
            raise ValueError(f"clip_grad={max_norm}; pass a norm above 0, or 0 for no clipping")
        self._prepared = self._present("to clip")._replace(max_norm=max_norm)

    def count_zeros(self) -> int:
        """The number of zero elements in the ready gradients, each counted once. Collective: every rank calls it.

        Raises:
            RuntimeError: no gradients are ready.
        """
        prepared = self._present("to count zeros in")
        if self.limits.count_zeros:
            return self._read().num_zeros
        return reduce_zeros(prepared.ready, everyone=self.everyone)

    def _present(self, purpose: str) -> _Prepared:
        if self._prepared is None:
            raise RuntimeError(f"no gradients are ready {purpose}: call it between prepare_grads and the update")
        return self._prepared

    @torch.no_grad()
    def publish_main_values_(self) -> None:
        """Quantise fp8 parameters from main values that were set outside of a step, and publish all. Collective.

        Raises CollectiveError if a peer is lost.
        """
        for source in (source for unit in self.units for source in unit.completes):
            if isinstance(source, QuantizedSource):
                source.share_extra_()
        for unit in self.units:
            self._publish(unit)
