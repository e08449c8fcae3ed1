"""The step, from reduced gradients to published parameters, over a tuple of units. Read this file first.

    reduce ─▶ one sweep and one small all-reduce ─▶ overflow? the scaler learns, nothing else changes
           ─▶ clip coefficient, or refuse ─▶ one update sweep per unit ─▶ publish what no later unit writes to

No line here knows how parameters are sharded, which rule moves them or in which numbers they are kept.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from opt_distributed.buffers.binding import UnusableGradientError
from opt_distributed.buffers.wire import CollectiveError
from opt_distributed.comm.collectives import Comm
from opt_distributed.step.clip import clip_coefficient
from opt_distributed.step.group_check import GroupCheck
from opt_distributed.step.hooked import add_over_ranks_
from opt_distributed.step.scaler import Scaler
from opt_distributed.step.spans import Spans, profiler_spans
from opt_distributed.step.stats import Family, Stats, reduce_norm, reduce_stats, reduce_zeros
from opt_distributed.step.unit import Ready, Unit

Groups = Sequence[Mapping[str, Any]]  # `param_groups`, read anew at every step


class StepResult(NamedTuple):
    """What a step says of itself; the same on every rank."""

    success: bool  # False: an overflow or a refused norm; nothing but the loss scale has changed
    grad_norm: float  # L2 norm of the mean gradient, unscaled, before clipping; infinite or NaN on an overflow
    num_zeros_in_grad: int | None  # None unless zeros are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When gradients are scaled down, and when a step is refused."""

    slots: tuple[str, ...] = ("",)  # names of the gradient norms; the first, "", is the model's own
    clips: tuple[bool, ...] = (True,)  # for each slot whether its gradients are scaled down to `max_norm`
    max_norm: float = 1.0  # of each slot that is clipped; 0 leaves all gradients as they are
    skip_above: float = math.inf  # a larger norm of slot "" refuses the step
    count_zeros: bool = False


class _Prepared(NamedTuple):
    """Between `prepare_grads` and `step_with_ready_grads`."""

    stats: Stats
    of_units: list[Ready]  # one for each unit
    inv_scale: float
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
    ):
        self.units = tuple(units)
        self.families = tuple(families)
        self.everyone = everyone  # all ranks of all units
        self.device = device  # of what travels between them
        self.scaler = scaler
        self.limits = limits
        self.spans = spans
        self.grad_norms_by_group: dict[str, float] = {}  # of the last step, by slot name
        self.num_begun = 0  # steps since construction, for errors
        self._ready: _Prepared | None = None
        self._group_check: GroupCheck | None = None

    def compare_groups(self, groups: Groups) -> None:
        """Lets every step compare the numbers of `groups` between ranks. Collective: all ranks call it together."""
        self._group_check = GroupCheck(
            groups,
            applied={piece.group for unit in self.units for piece in unit.pieces},
            own={name for unit in self.units for name in getattr(unit.rule, "hyper_names", ())},
            everyone=self.everyone,
        )

    def step(self, groups: Groups) -> StepResult:
        """One step. On an overflow, or a norm above the limit, no byte of any parameter or state changes."""
        overflow = self.prepare_grads(groups)
        norm = self.grad_norm
        zeros = self.num_zeros
        if overflow:
            self._ready = None
            return StepResult(False, norm, zeros)
        return StepResult(self.step_with_ready_grads(groups), norm, zeros)

    @torch.no_grad()
    def prepare_grads(self, groups: Groups) -> bool:
        """Reduces gradients, looks at them once, tells the scaler. True where they overflowed, on every rank alike.

        Raises:
            CollectiveError: a peer is lost; it names the step and the collective. No weight has changed.
            HyperError: on every rank, if ranks would update a group with different numbers. No weight has changed.
        """
        self.num_begun += 1
        with self._naming_the_step():
            stats, ready = self._reduced(groups)
        self._ready = _Prepared(stats, self._used(ready), 1.0 / self.scaler.scale, self.limits.max_norm)
        self.grad_norms_by_group = dict(zip(self.limits.slots, (self._norm(s) for s in range(len(stats.norms)))))
        self.scaler.update(stats.overflow)
        return stats.overflow

    @torch.no_grad()
    def step_with_ready_grads(self, groups: Groups) -> bool:
        """Clips, updates, publishes what `prepare_grads` made ready. False where the norm is above the limit.

        Raises:
            RuntimeError: no gradients are ready.
            CollectiveError: a peer was lost while parameters were gathered; it names the step and the collective.
        """
        ready = self._take_ready()
        if self.grad_norms_by_group[self.limits.slots[0]] > self.limits.skip_above:
            return False
        with self.spans("optimizer-clip-main-grad"):
            scales = self._clip(ready)
        with self._naming_the_step():
            units = list(zip(self.units, ready.of_units, strict=True))
            begun = [unit.begin_(of_unit, groups, scale_of_slot=scales) for unit, of_unit in units]
            add_over_ranks_(begun, device=self.device)
            for (unit, of_unit), of_hooks in zip(units, begun, strict=True):
                with self.spans("optimizer-inner-step"):
                    unit.update_(of_unit, groups, scale_of_slot=scales, begun=of_hooks)
                with self.spans("params-all-gather"):
                    for source in unit.completes:
                        source.publish_()
        return True

    def norm(self, norm_type: float) -> float:
        """The `norm_type`-norm of the gradients that `prepare_grads` made ready, unscaled; of slot "", as `grad_norm`.

        Every rank calls it, before `step_with_ready_grads`.

        Raises:
            RuntimeError: no gradients are ready.
            ValueError: `norm_type` is not above 0.
        """
        ready = self._prepared(f"for a {norm_type}-norm")
        return reduce_norm(ready.of_units, everyone=self.everyone, norm_type=norm_type, slot=0) * ready.inv_scale

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
            return ready.stats.num_zeros
        return reduce_zeros(ready.of_units, everyone=self.everyone)

    @property
    def grad_norm(self) -> float:
        """The model's gradient norm as `prepare_grads` found it last."""
        return self.grad_norms_by_group.get(self.limits.slots[0], 0.0)

    @property
    def num_zeros(self) -> int | None:
        """Zero elements in the gradients that are ready; None unless they are counted."""
        return self._ready.stats.num_zeros if self._ready is not None and self.limits.count_zeros else None

    def _reduced(self, groups: Groups) -> tuple[Stats, list[Ready]]:
        refused: UnusableGradientError | None = None  # carried to the other ranks by the statistics
        with self.spans("optimizer-copy-to-main-grad"):
            for family in self.families:
                for source in family.sources:
                    try:
                        source.reduce_()
                    except UnusableGradientError as error:
                        refused = refused or error
        with self.spans("optimizer-unscale-and-check-inf"):
            ready = [unit.ready() for unit in self.units]
            compared = self._group_check
            stats = reduce_stats(
                self.families,
                ready,
                everyone=self.everyone,
                device=self.device,
                num_slots=len(self.limits.slots),
                count_zeros=self.limits.count_zeros,
                refused=refused,
                flags=compared.flags(groups) if compared else (),
                check=lambda summed: compared.check(summed, groups) if compared else None,
            )
        return stats, ready

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

    def _norm(self, slot: int) -> float:
        assert self._ready is not None
        return self._ready.stats.norms[slot] * self._ready.inv_scale

    def _clip(self, ready: _Prepared) -> list[float]:
        norms = zip(self.grad_norms_by_group.values(), self.limits.clips, strict=True)
        coefficients = (clip_coefficient(norm, ready.max_norm) if clips else 1.0 for norm, clips in norms)
        return [ready.inv_scale * coefficient for coefficient in coefficients]

    def _prepared(self, what_for: str) -> _Prepared:
        if self._ready is None:
            raise RuntimeError(f"no gradients are ready {what_for}: ask between prepare_grads and the update")
        return self._ready

    def _take_ready(self) -> _Prepared:
        if self._ready is None or self._ready.stats.overflow:
            raise RuntimeError(
                "no gradients are ready: call prepare_grads first, and go on only where it returns False"
            )
        ready, self._ready = self._ready, None
        return ready
