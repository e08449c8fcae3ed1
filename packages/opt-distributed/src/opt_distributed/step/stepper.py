"""`Stepper`: one step, from the reduction of gradients to the publication of parameters. Read this file first.

    reduce ─▶ flags of the guards ─▶ one pass over the gradients, one small all-reduce
           ─▶ verdict: overflow, refusal, errors; loss scale ─▶ clip coefficient
           ─▶ first exchanges of matrices that ranks store parts of
           ─▶ one pass of updates for each unit ─▶ publish buffers that no later unit writes to

Where one rank refuses a step, the others learn of it by the sums of flags: which guard, and on how many ranks. All then
do the same:

    on a CPU            raise an error in `_decide`, after an exchange of who is at fault (`Watch.on_refusal`)
    on an accelerator   update with `skip` set on the device, which changes nothing; publish the unchanged parameters;
                        raise an error where the result is read, at the latest when the next step begins; nobody is
                        named. `prepare_grads` reads the verdict, and raises it before an update

The first guard that does not withdraw, in the order of `Guards`, says which error. The rank that found it raises its
own; every other one raises `Refusal.of_others`: `UnusableGradientError`, or `StorageError` for parameters that moved.
Where ranks only differ, all raise one error: `HyperError` (`EqualGroups`), `ReplicaError` (`WrittenReplicas`).

A *piece* is the part of a parameter that this rank updates. A *unit* is one rule with its pieces. A *source* has the
gradients of one buffer, and publishes its parameters: sends new values to the ranks that hold them. A *family* is the
sources that are reduced over one set of ranks: dense parameters, or experts. A norm *slot* is one of several gradient
norms; slot "" is the model's own.

Nothing here depends on how parameters are sharded, which rule updates them, or in which dtype they are kept. Reasons
for which all ranks refuse a step are guards (`step.guards`): a list of which the stepper knows nothing else.

On an accelerator the host queues all of this and reads nothing, unless other code wrote weights, which a guard then
compares: the verdict is a skip flag for the update, and scales are device tensors. Reading the result waits for the
device. One exception: with several ranks, each step reads the outcome of the step before, which the device has computed
long ago, so that every rank raises the errors of a step in the next one at the latest. A process without other ranks
raises them at once, and waits for nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from opt_distributed.buffers.main_grad import UnusableGradientError
from opt_distributed.buffers.wires import CollectiveError
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import ALONE, Comm, telling
from opt_distributed.pieces.piece import Groups, Ready
from opt_distributed.pieces.quantized import QuantizedSource
from opt_distributed.pieces.sources import FoundGrads, PeerSums, found_grads
from opt_distributed.step.capture import CapturedStep
from opt_distributed.step.guard import Guard
from opt_distributed.step.guards import Guards
from opt_distributed.step.outcome import Outcome, Scaler, StepResult, Values, warn_of_deleted
from opt_distributed.step.spikes import Spikes
from opt_distributed.step.unit import Unit
from opt_distributed.step.updates import update_units_
from opt_distributed.step.verdict import (
    Family,
    HostNumbers,
    Limits,
    Losses,
    Prepared,
    Report,
    Verdict,
    decide,
    host_flags,
    reduce_stats,
    used,
)
from opt_distributed.step.watch import Spans, Watch, profiler_spans
from opt_kernels.precision import without_autocast


class Stepper:
    """One step over any layout. Writes parameters, main values, state and the scaler; reads gradients and `groups`."""

    def __init__(
        self,
        *,
        units: Sequence[Unit],
        families: Sequence[Family],
        guards: Guards,
        everyone: Comm,
        device: devices.Device,
        scaler: Scaler,
        limits: Limits,
        spans: Spans = profiler_spans,
        graphs: bool = False,
        peer_sums: PeerSums,
        instances: Comm = ALONE,
        empty_slots: frozenset[int] = frozenset(),
        at_start: Sequence[Callable[[Outcome | None], None]] = (),
        watch: Watch,
        spikes: Spikes | None = None,
    ):
        """With `graphs`, `step` is captured and replayed (`CapturedStep`); raises GraphError if the device has none.

        `empty_slots` are norm slots without parameters on any rank. `at_start` are called when a step begins, with the
        outcome of the step before, also of one that an error refused; collective.
        """
        self.units = units
        self.families = families
        self.everyone = everyone  # all ranks of all units, of one optimizer instance
        self.instances = instances  # the ranks in the place of this rank in all instances
        self._has_others = everyone.size > 1 or instances.size > 1
        self.accelerator = device
        self.device = device.torch_device  # of tensors that are sent between ranks
        self.scaler = scaler
        self.limits = limits
        self.spikes = spikes
        self.losses = Losses(self.device)
        self.spans = spans
        self.peer_sums = peer_sums
        self.num_begun = 0  # steps since construction, for errors
        self._empty_slots = empty_slots
        self.last: Outcome | None = None  # of the last step; None before the first, and after one that an error refused
        self.sources = [source for family in families for source in family.sources]
        self._guards = guards
        self._at_start = at_start
        self._previous: Outcome | None = None  # of the last step, whose errors the next one raises
        self._flags = HostNumbers(self.accelerator)
        self._prepared: Prepared | None = None
        self._seen_grads: FoundGrads = []  # when they were prepared
        self._watch = watch
        self._captured = CapturedStep(self.units, self.sources, scaler=scaler, device=device) if graphs else None
        warn_of_deleted()

    @property
    def guards(self) -> list[Guard]:
        """Equal on every rank, and fixed when the first step begins: append others before."""
        return self._guards.all

    def check_params(self, groups: Groups) -> None:
        """Raise the error of `SameParams` if `groups` hold other parameters than those they were built with."""
        if (replaced := self._guards.same_params.find(groups)) is not None:
            raise replaced

    def check_groups(self, groups: Groups) -> None:
        """Raise the errors of `UsableGroups` if this rank cannot step with the entries of `groups`."""
        self._guards.usable_groups.check(groups)

    def has_ready_grads(self) -> bool:
        """Whether `prepare_grads` has prepared gradients that no rank has written since. Collective if it has."""
        if self._prepared is None:
            return False
        pairs = zip(self._seen_grads, found_grads(self.sources), strict=True)
        are_same = all(seen is grad and count == now for (seen, count), (grad, now) in pairs)
        for comm in (self.everyone, self.instances):
            are_same = all(comm.gather_objects(are_same))
        if not are_same:
            self.drop_ready_grads()
        return are_same

    def drop_ready_grads(self) -> None:
        """Forget what `prepare_grads` has prepared."""
        self._prepared = None
        self._seen_grads = []

    def accept_loaded_groups(self, groups: Groups) -> None:
        """Accept the entries that a load, which has checked them, wrote to the groups."""
        self._guards.usable_groups.accept_loaded(groups)

    @torch.no_grad()
    @without_autocast()
    def step(self, groups: Groups) -> StepResult:
        """Make one step. If it is skipped (`verdict.REASONS`), no parameter or state changes.

        Raises the errors of `prepare_grads` and `step_with_ready_grads`.
        """
        with self._step_context(begins=True):
            ready, flags = self._begin(groups)
            if self._captured is None:
                prepared = self._decide(ready, flags)
                # A CPU knows the verdict here; an accelerator skips the update on the device.
                may_update = self.accelerator.is_asynchronous or self._read().success
                # If this rank refuses its groups, the guards have replaced them, so that it can join collectives.
                self._finish_(prepared, self._guards.groups, success=may_update)
            else:
                groups = self._guards.groups
                with self._watched(ready, groups, self.scaler.inverse, self.limits.max_norm):
                    self._replay_(self._captured, ready, flags)
        result = self.result()
        if not self._has_others and any(flags):
            self._read()  # a rank alone knows its flags without waiting; others raise, all of them, in the same call
        return result

    @torch.no_grad()
    @without_autocast()
    def prepare_grads(self, groups: Groups) -> bool:
        """Reduce gradients, compute their statistics, update the loss scale. Returns whether they overflowed.

        The result is the same on every rank. On an accelerator the host waits for it.

        Raises:
            CollectiveError: a peer is lost; names the step and the collective. No parameter has changed.
            RuntimeError: gradients are ready already, and no rank has written one since.
            UnusableGradientError, StorageError, HyperError, ValueError, ReplicaError: on every rank, from the first
                guard that refuses the step; ranks that found nothing themselves raise UnusableGradientError or
                StorageError. No parameter has changed.
        """
        with self._step_context(begins=True):
            self._prepared = prepared = self._decide(*self._begin(groups))
            self._seen_grads = found_grads(self.sources)
            if overflow := self._read().overflow:
                self._finish_(prepared, groups, success=False)
            return overflow

    @torch.no_grad()
    @without_autocast()
    def step_with_ready_grads(self, groups: Groups) -> bool:
        """Clip the gradients, update and publish. Returns False, without an update, if the step is skipped (`REASONS`).

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
        prepared = self._prepared
        self.drop_ready_grads()  # an update that raises half-way must not be made again
        success = self._read().success
        with self._step_context():
            if success:
                self._guards.check_again(groups, prepared.max_norm)
            self._finish_(prepared, groups, success=success)
        return success

    # --- a step, part by part ---------------------------------------------------------------------------------------

    def _begin(self, groups: Groups) -> tuple[list[Ready], list[float]]:
        """Reduce and read the gradients, for each unit, and ask the guards for their flags. All ranks refuse a step for
        which one cannot read them.

        Raises the errors of the step before, if they have not been read yet, and RuntimeError if gradients are ready.
        """
        if self.has_ready_grads() and not self._read().overflow:
            raise RuntimeError("gradients are ready: call step_with_ready_grads(), or zero_grad() to drop them")
        previous = self._previous
        self._previous = None
        self.last = None
        self.drop_ready_grads()
        for check in self._at_start:
            check(previous)
        if previous is not None and previous.is_unread:
            previous.read()  # on an accelerator, where nobody names the ranks at fault, as `_read` does
        self.num_begun += 1
        self._guards.begin(groups)
        with self.spans("optimizer-copy-to-main-grad"):
            for source in self.sources:
                try:
                    source.reduce_()
                except UnusableGradientError as error:  # this rank joins the other reductions all the same
                    self._guards.refuse(error)
            self.peer_sums.add_()
        ready = []
        for unit in self.units:
            try:
                ready.append(unit.ready(self._guards.refuse))
            except Exception as error:  # of any kind, because the other ranks wait
                self._guards.refuse(error.with_traceback(None))  # its frames may keep parameters alive
                ready.append(Ready([], []))
        if self._captured is not None:
            self._guards.refuse(self._captured.missing_grad_error(ready))
        return ready, self._guards.flags()

    def _decide(self, ready: Sequence[Ready], flags: list[float]) -> Prepared:
        """Everything up to the verdict, and the next loss scale. Collective.

        On a CPU the errors of guards are raised here, on every rank; on an accelerator, when the verdict is read.
        """
        with self.spans("optimizer-unscale-and-check-inf"):
            verdict = self._judge(ready, self._flags.write_([*flags, *host_flags(self.families)]))
        self._note(verdict, flags)
        if self.accelerator.is_asynchronous:
            self.scaler.update(verdict.overflow, unless=verdict.is_wrong)
        else:
            report = self._read()
            self.scaler.update(report.overflow)
        return Prepared(verdict, used(self.families, ready), self.limits.max_norm)

    def _judge(self, ready: Sequence[Ready], flags: Tensor) -> Verdict:
        """Sum the statistics of all ranks in one small all-reduce, and decide. The host reads nothing. `flags` are
        those of the guards, then those of the sources."""
        inv_scale = self.scaler.inverse
        may_refuse_late = self._has_others and self._captured is None
        numbers = reduce_stats(
            self.families,
            ready,
            flags,
            self.limits,
            losses=self.losses.take_for_judgement_(),
            device=self.device,
            everyone=self.everyone,
            instances=self.instances,
            refuse=self._guards.refuse_late if may_refuse_late else None,
        )
        return decide(numbers, self._guards.agreed, inv_scale=inv_scale, limits=self.limits, spikes=self.spikes)

    def _end_judgement_(self, verdict: Verdict) -> None:
        """Append the judged norm and loss to the window of spikes, and clear the noted losses.

        Nothing happens if a guard refuses the step on an accelerator. On a CPU it has raised an error before.
        """
        is_refused = verdict.is_wrong if self.accelerator.is_asynchronous else torch.zeros_like(verdict.is_wrong)
        if self.spikes is not None:
            self.spikes.append_judged_(unless=is_refused)
        self.losses.clear_judged_(unless=is_refused)

    def _finish_(self, prepared: Prepared, groups: Groups, *, success: bool) -> None:
        """Update and publish if `success`; it is False if the host knows that the step is skipped."""
        self._end_judgement_(prepared.verdict)
        inverse = prepared.verdict.inv_scale
        with self._watched(prepared.ready, groups, inverse, prepared.max_norm, skipped=not success):
            if success:
                with self.accelerator.joining_side_stream():
                    self._update_(prepared, groups, then=self._publish)

    def _update_(self, prepared: Prepared, groups: Groups, *, then: Callable[[Unit], None] | None = None) -> None:
        """Clip, and update each unit; then call `then` with it."""
        update_units_(
            self.units,
            prepared,
            groups,
            limits=self.limits,
            accelerator=self.accelerator,
            device=self.device,
            spans=self.spans,
            then=then,
        )

    def _replay_(self, captured: CapturedStep, ready: Sequence[Ready], flags: list[float]) -> None:
        """Make a step whose work on the device is a graph, except at first and after something frozen has changed."""

        def work(ready: Sequence[Ready], flags: Tensor, groups: Groups) -> Verdict:
            verdict = self._judge(ready, flags)
            self.scaler.update(verdict.overflow, unless=verdict.is_wrong)
            self._end_judgement_(verdict)
            self._update_(Prepared(verdict, ready, self.limits.max_norm), groups)
            return verdict

        with self.spans("optimizer-inner-step"):
            on_device = self._flags.write_([*flags, *host_flags(self.families)])
            verdict = captured.step(work, ready, on_device, self._guards.groups, self.limits)
        self._note(verdict, flags)
        for unit in self.units:
            unit.note_averaged()
            self._publish(unit)

    def _publish(self, unit: Unit) -> None:
        """Send the new values of the buffers that no later unit writes to. Collective."""
        with self.spans("params-all-gather"):
            for source in unit.completes:
                source.publish_()

    @contextmanager
    def _watched(
        self,
        ready: Sequence[Ready],
        groups: Groups,
        inverse: float | Tensor,
        max_norm: float,
        *,
        skipped: bool = False,
    ) -> Iterator[None]:
        self._watch.before(self.num_begun, ready, inverse, skipped=skipped)
        yield
        self._watch.after(self._outcome(), groups, max_norm=max_norm)

    @contextmanager
    def _step_context(self, *, begins: bool = False) -> Iterator[None]:
        """Tell the peers of an error inside, and name the step in one of a collective. At the end, let go of groups."""
        try:
            with self.telling(self.num_begun + begins):
                yield
        except CollectiveError as error:
            raise CollectiveError(f"step {self.num_begun}, {error}") from error
        finally:
            self._guards.groups = ()  # an unread outcome keeps the guards alive, but must not keep parameters

    def telling(self, step: int) -> AbstractContextManager[None]:
        """Tell ranks that wait for this one in step number `step` of an error that is raised inside. An error that all
        ranks raise does no harm: no rank waits then."""
        comms = [comm for family in self.families for comm in family.axes.comms]
        return telling((self.everyone, self.instances, *comms), f"step {step}")

    # --- its outcome ------------------------------------------------------------------------------------------------

    def _note(self, verdict: Verdict, flags: list[float]) -> None:
        # Without other ranks, only this one's flags can be an error, which `step` reads.
        is_unread = self.accelerator.is_asynchronous and (self._has_others or any(flags))
        outcome = Outcome(
            verdict, self._guards.agreed, self.num_begun, self.accelerator, owner=self, is_unread=is_unread
        )
        self.last = self._previous = outcome

    def _outcome(self) -> Outcome:
        assert self.last is not None
        return self.last

    def _read(self, outcome: Outcome | None = None) -> Report:
        """Read the outcome of this or an earlier step, for which the host waits. Raises its errors.

        Collective on a CPU if the step is refused: guards may compare ranks, and the watch names those at fault.
        """
        outcome = self._outcome() if outcome is None else outcome
        try:
            return outcome.read()
        except Exception as error:
            if outcome is self.last and not self.accelerator.is_asynchronous:
                self._watch.on_refusal(outcome.step, error, self._guards.refusals())
            raise
        finally:
            if outcome.error is not None and outcome is self.last:
                self.last = self._prepared = None  # such a step has no norms

    def result(self) -> StepResult:
        """Return the result of the last step, or of gradients that are prepared, without waiting."""
        outcome = self._outcome()

        def values() -> Values:
            report = self._read(outcome)
            return report.success, report.norms[0], report.num_zeros if self.limits.count_zeros else None

        return StepResult.later(values)

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
        return {name: 0.0 if slot in self._empty_slots else norm for slot, (name, norm) in enumerate(norms)}

    @property
    def grad_norm(self) -> float:
        """The gradient norm of the last step; 0 before the first, and after one that an error refused."""
        return 0.0 if self.last is None else self._read().norms[0]

    # --- between the halves of a step -------------------------------------------------------------------------------

    def prepared(self, purpose: str) -> Prepared:
        """Return the gradients between `prepare_grads` and `step_with_ready_grads`. Raises RuntimeError at other times;
        `purpose` is for the message."""
        if self._prepared is None:
            raise RuntimeError(f"no gradients are ready {purpose}: call it between prepare_grads and the update")
        return self._prepared

    def clip_to(self, max_norm: float) -> None:
        """Clip the ready gradients to `max_norm` instead of `limits.max_norm`, in the slots that are clipped.

        Raises:
            RuntimeError: no gradients are ready.
            ValueError: `max_norm` is below 0, which means no clipping, or NaN.
        """
        if not max_norm >= 0:
            raise ValueError(f"clip_grad={max_norm}; pass a norm above 0, or 0 for no clipping")
        self._prepared = self.prepared("to clip")._replace(max_norm=max_norm)

    @torch.no_grad()
    @without_autocast()
    def publish_main_values_(self) -> None:
        """Quantise fp8 parameters from main values that were set outside of a step, and publish all. Collective.

        Raises CollectiveError if a peer is lost.
        """
        for unit in self.units:
            for source in unit.completes:
                if isinstance(source, QuantizedSource):
                    source.share_extra_()
        for unit in self.units:
            self._publish(unit)
