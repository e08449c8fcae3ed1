"""A step as a graph: the device's work between the reduction of gradients and the publication of parameters.

    reduce ─▶ [ statistics and their all-reduce ─▶ verdict, scaler ─▶ clip coefficient ─▶ updates, counts ] ─▶ publish
               captured once, then one call for each step

Before each replay, the host writes the numbers of the parameter groups and its own objections to memory that the graph
reads, and copies gradients that autograd allocates anew to fixed memory. `opt_kernels.hyper_table` describes what a
capture freezes and what stays live. If something frozen has changed, one step runs without the graph, and the next one
captures again. Reductions and gathers stay outside, because they overlap with backward and forward passes.
"""

import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.device import Device
from opt_distributed.step.group_check import GroupCheck, Groups
from opt_distributed.step.hyper import FIELDS
from opt_distributed.step.limits import Limits
from opt_distributed.step.ready import Ready
from opt_distributed.step.scaler import Scaler
from opt_distributed.step.sources import BufferedGrads, LaidOutGrads, OwnGrads
from opt_distributed.step.stats import Family, Known, Upload, reduce_stats
from opt_distributed.step.unit import Unit, begin_units_
from opt_distributed.step.verdict import Decided, Terms
from opt_kernels.hooks import bare
from opt_kernels.hyper_table import HyperTable
from opt_paramgroups import ParamId

T = TypeVar("T")
MANY_MISSES = 10  # successive steps without a graph, after which a warning says so
_LOG = logging.getLogger(__name__)


class Recorded(Generic[T]):
    """Work that is captured when two successive calls have the same key, and then replayed while the key stays."""

    def __init__(self, device: Device):
        """Raises GraphError if the device does not support graphs."""
        self._graph = device.graph()
        self._captured: tuple[Hashable, T] | None = None  # the key of the capture, and the tensors that replays write
        self._last: Hashable = None
        self._num_misses = 0  # successive calls with a new key

    def __call__(self, work: Callable[[], T], key: Hashable) -> T:
        """Return the result of `work`: at every replay, the same tensors with new values.

        `key` contains everything that a capture freezes.
        """
        if self._captured is not None and self._captured[0] == key:
            self._graph.replay()
            return self._captured[1]
        is_known, self._last = self._last == key, key
        if not is_known:  # the first run compiles kernels and builds tables, which a capture must not do
            self._captured = None
            self._miss()
            return work()
        self._num_misses = 0
        with self._graph.capture():
            self._captured = (key, work())
        self._graph.replay()
        return self._captured[1]

    def _miss(self) -> None:
        self._num_misses += 1
        if self._num_misses == MANY_MISSES:
            _LOG.warning(
                "the last %d steps ran without their graph: before each of them, memory of gradients, parameters or "
                "states has moved, or an entry of param_groups that is not a number has changed",
                MANY_MISSES,
            )


class GraphedStep:
    """The part of a `Stepper`'s step that is captured."""

    def __init__(
        self,
        *,
        units: Sequence[Unit],
        families: Sequence[Family],
        everyone: Comm,
        device: torch.device,
        scaler: Scaler,
    ):
        """Raises GraphError if the device does not support graphs."""
        self.units, self.families, self.everyone = units, families, everyone
        self.device, self.scaler = device, scaler
        self._queues = devices.device_of(device)
        self._recorded: Recorded[Decided] = Recorded(self._queues)
        own = [name for unit in units for name in getattr(unit.rule, "hyper_names", ())]
        choosing = [name for unit in units for name in getattr(bare(unit.rule), "choosing_numbers", ())]
        self._table = HyperTable((*FIELDS, *own), device=device, upload=self._queues.upload, choosing=choosing)
        self._constants = _Constants(self._queues)
        self._known = Known(self._queues)
        self._grads = [_StableGrads() for _ in units]

    def lacking(self, ready: Sequence[Ready]) -> ParamId | None:
        """A parameter that has no gradient on this rank; None if all have one."""
        for family in self.families:
            for source in family.sources:
                if isinstance(source, BufferedGrads) and (id := source.lacking()) is not None:
                    return id
        for unit, of_unit in zip(self.units, ready, strict=True):
            if of_unit.pieces is not unit.pieces:
                there = {piece.id for piece in of_unit.pieces}
                return next(piece.id for piece in unit.pieces if piece.id not in there)
        return None

    @torch.no_grad()
    def step(
        self, ready: Sequence[Ready], groups: Groups, known: Sequence[float], limits: Limits, check: GroupCheck | None
    ) -> Decided:
        """Compute the statistics and the verdict, and update the ready pieces.

        `known` is described in `stats.known_numbers`. If gradients are lacking, it must say that this rank refuses
        the step. The tensors of the result are valid until the next call.
        """
        is_complete = self.lacking(ready) is None
        ready = [grads.kept(of_unit) for grads, of_unit in zip(self._grads, ready, strict=True)]
        self._table.refresh_(groups)
        self.scaler.stay_on(self._queues)
        numbers = self._known.write_(known)
        if not is_complete:
            return self._run(ready, numbers, limits, check, lambda make: self._queues.upload(make()))
        key = self._key(ready, limits)
        upload = self._constants.of(key)
        return self._recorded(lambda: self._run(ready, numbers, limits, check, upload()), key)

    def _run(
        self, ready: Sequence[Ready], known: Tensor, limits: Limits, check: GroupCheck | None, upload: Upload
    ) -> Decided:
        inv_scale = self.scaler.inverse
        numbers = reduce_stats(
            self.families,
            ready,
            everyone=self.everyone,
            device=self.device,
            num_slots=len(limits.slots),
            count_zeros=limits.count_zeros,
            known=known,
            upload=upload,
        )
        decided = Decided.of(numbers, check, Terms(len(limits.slots), inv_scale, limits.skip_above))
        self.scaler.update(decided.overflow, unless=decided.has_error)
        scales, groups, skip = decided.scales(limits.max_norm, limits.clips), self._table.groups, decided.skip
        begun = begin_units_(self.units, ready, groups, scale_of_slot=scales, skip=skip, device=self.device)
        for unit, of_unit, of_hooks in zip(self.units, ready, begun, strict=True):
            unit.update_(of_unit, groups, scale_of_slot=scales, skip=skip, begun=of_hooks)
        return decided

    def _key(self, ready: Sequence[Ready], limits: Limits) -> Hashable:
        """Everything that a capture freezes. Counts are compared by identity: loading state replaces them."""
        counts = [count for unit, of_unit in zip(self.units, ready, strict=True) for count in unit.counts(of_unit)]
        for count in counts:
            count.stay_on(self.device)
        factor = self.scaler.factor
        scale = factor.data_ptr() if isinstance(factor, Tensor) else factor
        memory = [
            tensor for unit, of_unit in zip(self.units, ready, strict=True) for tensor in (*of_unit.grads, *unit.memory)
        ]
        return tuple(counts), addresses(memory), scale, self._table.frozen, limits


def addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """The present addresses of these tensors."""
    return tuple(map(Tensor.data_ptr, tensors))


class _Constants:
    """Host tensors that are the same in every run of captured work; they are uploaded in the first."""

    def __init__(self, device: Device):
        self._device = device
        self._key: Hashable = None
        self._uploaded: list[Tensor] = []

    def of(self, key: Hashable) -> Callable[[], Upload]:
        """Return a function that begins a run and returns its `Upload`. Runs with equal keys make the same uploads."""
        if key != self._key:
            self._key, self._uploaded = key, []
        uploaded = self._uploaded

        def begin() -> Upload:
            numbers = itertools.count()

            def upload(make: Callable[[], Tensor]) -> Tensor:
                number = next(numbers)
                if number == len(uploaded):
                    uploaded.append(self._device.upload(make()))
                return uploaded[number]

            return upload

        return begin


class _StableGrads:
    """Fixed copies of gradients that autograd allocates anew in each backward pass. Others are in buffers already."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}  # by position among the pieces

    def kept(self, ready: Ready) -> Ready:
        """Return `ready` with gradients that are in the same memory at every step."""
        moving = [at for at, piece in enumerate(ready.pieces) if isinstance(piece.source, OwnGrads | LaidOutGrads)]
        if not moving:
            return ready
        grads = list(ready.grads)
        for at in moving:
            if at not in self._copies or not _are_alike(self._copies[at], grads[at]):
                self._copies[at] = torch.empty_like(grads[at])
        torch._foreach_copy_([self._copies[at] for at in moving], [grads[at] for at in moving])
        for at in moving:
            grads[at] = self._copies[at]
        return ready._replace(grads=grads)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape
