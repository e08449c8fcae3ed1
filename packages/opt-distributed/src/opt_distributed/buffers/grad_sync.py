"""`GradSync`: reduces all buckets in the step, or each in backward as soon as it is complete, in one `LaunchOrder`.

Ranks of a group must launch the same collectives in the same order; otherwise gradients of different parameters are
summed. The order must not depend on which gradients a rank has, or when, because these may differ between ranks. Each
bucket has a `LaunchKey` on which the ranks that reduce it have agreed, and every rank launches its buckets in ascending
order of the keys. A key belongs to a collective rather than to a rank. So the orders of any two ranks agree, even if
dense and expert buckets are reduced over different groups that overlap.
"""

import gc
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakSet, ref

import torch
from torch import nn

from opt_distributed.buffers.bucket import BucketState, GradBucket, LargeGrads, LaunchKey
from opt_distributed.buffers.main_grad import (
    GradientError,
    SparseGradientError,
    adopt_main_grad_,
    take_grad_,
)
from opt_distributed.buffers.wires import CollectiveError, naming
from opt_distributed.comm.collectives import group_of
from opt_distributed.comm.device import HostCopy
from opt_distributed.comm.roles import Axes, from_all_replicas
from opt_paramgroups import ParamId


class LaunchOrder:
    """The order of launches of chunks whose iterations begin and end together, such as those of one optimizer.

    A bucket is launched once it and all buckets before it are complete; `launch_through` launches the rest. Nothing is
    launched early while a wrapped model outside of this order reduces over one of the process groups: its launches
    could come between these on one rank and after them on another.
    """

    def __init__(self, chunks: Sequence["GradSync"]):
        numbers = sorted(chunk.number for chunk in chunks)
        if len(set(numbers)) < len(numbers):
            raise ValueError(
                f"model chunks have the numbers {numbers}; pass a different chunk= to each DistributedDataParallel"
            )
        self.chunks = tuple(chunks)
        self._previous: GradBucket | None = None
        self._has_warned = False
        self.sort()

    def sort(self) -> None:
        """Sort buckets by their present keys."""
        buckets = [(chunk, bucket) for chunk in self.chunks for bucket in chunk.buckets]
        self._sequence = sorted(buckets, key=lambda pair: pair[1].key)

    @property
    def may_launch_early(self) -> bool:
        """Whether complete buckets are launched during backward on this rank.

        Another rank may keep a model alive that this one has dropped, and so launch nothing early.
        """
        if not self.any_may_launch_early:
            return False
        others = _outside_chunks(self.chunks)
        if others and not self._has_warned:
            self._has_warned = True
            gc.collect()  # unused models may be alive, because hooks and parameters form reference cycles
            others = _outside_chunks(self.chunks)
            if others:
                warnings.warn(
                    f"overlap_grad_reduce=True: {len(others)} more wrapped model chunks reduce over the same process "
                    "groups, so that reductions start in finish_grad_sync() rather than in backward; pass the chunks "
                    "of one model to one get_optimizer call, or to opt_distributed.share_launch_order",
                    stacklevel=2,
                )
        return not others

    @property
    def any_may_launch_early(self) -> bool:
        """Whether any rank may launch complete buckets during backward; the same on all ranks."""
        return all(chunk.may_launch_early for chunk in self.chunks)

    def launch_ready(self) -> None:
        """Launch, in order, complete buckets and those of started chunks, up to the first that is neither."""
        early = self.may_launch_early
        for chunk, bucket in self._pending():
            is_ready = early and bucket.is_complete and not bucket.key.is_late
            if not (is_ready or chunk.is_started):
                return
            self._launch(chunk, bucket)

    def launch_through(self, last: "GradSync") -> None:
        """Launch all buckets of `last`, complete or not, and, in order, all buckets that precede one of them."""
        for chunk, bucket in self._pending():
            if all(other.state is not BucketState.ACCUMULATING for other in last.buckets):
                return
            self._launch(chunk, bucket)

    def _pending(self) -> Iterator[tuple["GradSync", GradBucket]]:
        """Buckets that are not launched yet, in order, except those whose memory was freed."""
        for chunk, bucket in self._sequence:
            if bucket.state is BucketState.ACCUMULATING:
                yield chunk, bucket

    def _launch(self, chunk: "GradSync", bucket: GradBucket) -> None:
        """Launch a bucket, after the previous one has advanced a stage: only one at a time has scratch memory."""
        if self._previous is not None:
            self._previous.advance()
        chunk.before_launch()
        self._previous = bucket
        bucket.launch(chunk.iteration)


def share_order(chunks: Iterable["GradSync"]) -> None:
    """Give one order of launches to `chunks` and to all chunks that share an order with one of them.

    Raises:
        ValueError: two of them have the same number.
    """
    linked = dict.fromkeys(other for chunk in chunks for other in chunk.launch_order.chunks)
    order = LaunchOrder(list(linked))
    for chunk in order.chunks:
        chunk.launch_order = order


# Process groups are global to a process, and so is the order of their collectives: the only state of this module.
_live: WeakSet["GradSync"] = WeakSet()
_lock = threading.Lock()


def _outside_chunks(chunks: Sequence["GradSync"]) -> list["GradSync"]:
    """Live chunks outside of `chunks` that reduce over one of their groups."""
    with _lock:
        live = list(_live)
    groups = {group for chunk in chunks for group in chunk.groups}
    return [other for other in live if other not in chunks and not groups.isdisjoint(other.groups)]


class Family(NamedTuple):
    """The buckets of dense parameters, or those of experts."""

    axes: Axes  # the replicas, which all have the same buckets
    buckets: list[GradBucket]
    limit: LargeGrads


class GradSync:
    """Reduces the buckets of one model chunk, in one order on all ranks (`launch_order`).

    The first iteration launches nothing early. It counts the gradients that each parameter receives in the last
    microbatch, and records when buckets become complete. For each bucket, all ranks that reduce it use the time of the
    first of them. A bucket that lacked a gradient on any rank is launched last on all ranks, by `finish`. Without
    `learns`, nothing is recorded, and nothing overlaps.
    """

    def __init__(
        self,
        buckets: Sequence[GradBucket],
        *,
        in_backward: bool,  # whether complete buckets are reduced at once, from the second iteration on
        learns: bool,
        number: int,
        before_launch: Callable[[], None],
    ):
        self.buckets = tuple(buckets)
        self.in_backward = in_backward
        self.number = number  # of the chunk
        self.before_launch = before_launch  # starts collectives that precede reductions on every rank
        self.is_last_microbatch = True
        self.is_started = False  # whether all buckets may be launched, complete or not
        self.iteration = 1  # reductions begun, counted from 1
        self._has_to_learn = learns
        self.families: list[Family] = []
        self.groups: list[object] = []  # process groups, or a `Comm` that has none
        for is_expert in (False, True):
            family_buckets = [bucket for bucket in buckets if bucket.reduction.is_expert == is_expert]
            if family_buckets:
                axes = family_buckets[0].reduction.axes
                self.families.append(Family(axes, family_buckets, LargeGrads()))
                for comm in (axes.dp, axes.inter):
                    if comm.size > 1:
                        self.groups.append(group_of(comm) or comm)
        self._bucket_of = {id: bucket for bucket in self.buckets for id in bucket.ids}
        self._completed: dict[GradBucket, int] = {}  # in this iteration: buckets, and how many were complete before
        self.has_run = False  # whether a pass of this iteration may have launched buckets on some rank
        self._is_finished = False
        for index, bucket in enumerate(self.buckets):
            is_expert = bucket.reduction.is_expert
            bucket.key = LaunchKey(not in_backward, -number, 0.0, is_expert, index)
        self.launch_order = LaunchOrder([self])
        with _lock:
            _live.add(self)

    @property
    def order(self) -> list[GradBucket]:
        """The buckets, in the order of their launches."""
        return sorted(self.buckets, key=lambda bucket: bucket.key)

    @property
    def may_launch_early(self) -> bool:
        """Whether complete buckets may be launched before `finish`; the same on all ranks."""
        return self.in_backward and not self._has_to_learn and not self._is_finished

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients inside: for all microbatches except the last."""
        before = self.is_last_microbatch
        self.is_last_microbatch = False
        try:
            yield
        finally:
            self.is_last_microbatch = before

    def accumulate(self, id: ParamId, param: nn.Parameter) -> None:
        """Add a gradient that autograd left to its accumulator. In the last microbatch, launch buckets that are ready.

        A gradient that cannot be used is dropped: `finish` raises, after the reductions that other ranks take part in.

        Raises:
            GradientError: a gradient of this parameter may not be added now.
        """
        bucket = self._bucket_of[id]
        bucket.check_accumulating(id)
        adopt_main_grad_(param, bucket.accumulators[id], id)
        try:
            take_grad_(param, id)
        except SparseGradientError as error:
            param.grad = None
            bucket.refuse(error)
        if self.is_last_microbatch:
            self.has_run = True
            bucket.note(id)
            if bucket.is_complete:
                self._completed.setdefault(bucket, len(self._completed))
                self.launch_order.launch_ready()

    def start(self) -> None:
        """Launch every bucket, complete or not, as soon as all buckets before it are launched."""
        if not self._is_finished:
            for bucket in self.buckets:
                bucket.check_here()
            self.is_started = True
            self.launch_order.launch_ready()

    def reduce_everywhere(self) -> None:
        """Let this iteration's reductions give every rank the whole gradients, in all chunks of the launch order.

        Raises:
            GradientError: a reduction to shards has begun.
        """
        buckets = [bucket for chunk in self.launch_order.chunks for bucket in chunk.buckets]
        for bucket in buckets:
            is_to_shards = bucket.memory.layout.num_shards > 1 and not bucket.memory.reduces_everywhere
            if is_to_shards and bucket.state in (BucketState.IN_FLIGHT, BucketState.REDUCED):
                raise GradientError(
                    f"force_all_reduce=True, but {bucket.name} was reduced to shards already; pass it to the first "
                    "finish_grad_sync() of the iteration, and do not call start_grad_sync() before"
                )
        for bucket in buckets:
            bucket.memory.reduces_everywhere = bucket.memory.layout.num_shards > 1

    def finish(self) -> None:
        """Complete the reduction of this iteration's gradients. A second call does nothing.

        Raises:
            CollectiveError: a collective failed, or exceeded the timeout of its group.
            UnusableGradientError: gradients must not be used (`GradBucket.problem`). All reductions are complete, so
                that no other rank waits for this one.
        """
        if not self._is_finished:
            self.launch_order.launch_through(self)
        for bucket in self.order:
            bucket.finish()
        if not self._is_finished:
            if self._has_to_learn:
                self._learn()
            self._judge()
        self._is_finished = True
        for bucket in self.order:
            if bucket.problem is not None:
                raise bucket.problem

    def begin(self) -> None:
        """Begin an iteration, in which gradients may accumulate again. Waits for pending reductions.

        If the gradients of the last iteration are dropped without a reduction, buckets may have been launched on this
        rank but not on another, so all buckets are launched first. If only this rank drops the iteration, its
        reductions are matched with those of the iteration that the other ranks continue, or of their next one, whose
        gradients are then wrong. The exchange that compares what is dropped is then matched with the exchange of their
        step, which fails before it updates anything.

        Raises:
            GradientError: another rank drops another iteration, or none.
        """
        if self.has_run and self.launch_order.any_may_launch_early:
            self.launch_order.launch_through(self)
            for family in self.families:
                self._compare_dropped(family.axes)
        for bucket in self.order:
            bucket.begin()
        self.iteration += self._is_finished
        self._completed = {}
        self._is_finished = False
        self.has_run = False
        self.is_started = False

    def _compare_dropped(self, axes: Axes) -> None:
        """Raise GradientError if the replicas of a family do not all drop this iteration. Collective."""
        last = self.order[-1].name
        what = f"drop of iteration {self.iteration} of chunk {self.number} by zero_grad, after the reduction of {last}"
        cause: CollectiveError | None = None
        try:
            with naming(what):
                dropped = from_all_replicas(axes, (self.number, self.iteration))
            found = "" if len(set(dropped)) == 1 else f"(chunk, iteration) are {dropped}, by rank"
        except CollectiveError as error:
            cause = error
            found = str(error)
        if found:
            raise GradientError(
                f"ranks dropped the gradients of different iterations: {found}; run every training forward and its "
                "backward on all ranks, drop an iteration on all of them or on none, and evaluate on one rank with "
                "model.eval() or torch.no_grad()"
            ) from cause

    def _judge(self) -> None:
        """Refuse buckets whose checks say so, the same on all ranks. The host waits once for all of them."""
        checked = {bucket: bucket.checks for bucket in self.buckets if bucket.checks is not None}
        if not checked:
            return
        numbers = torch.stack([checks.finish() for checks in checked.values()])
        on_host = HostCopy(numbers, self.buckets[0].memory.queues).wait().tolist()
        norms = {}
        for (bucket, checks), (is_bad, norm) in zip(checked.items(), on_host, strict=True):
            norms[bucket] = norm
            if is_bad:
                bucket.refuse(checks.problem())
        for family in self.families:
            checked_buckets = [bucket for bucket in family.buckets if bucket in norms]
            largest = max(checked_buckets, key=norms.__getitem__, default=None)
            if largest is not None:
                largest.refuse(family.limit.verdict(norms[largest], largest.name))

    def _learn(self) -> None:
        """Agree with the replicas of each family when its buckets are complete, and which may lack a gradient.

        Collective over each family in turn: keys that differed between ranks would launch other buckets together.
        """
        num_buckets = len(self.buckets)
        for bucket in self.buckets:
            bucket.expected = {id: max(bucket.arrivals.get(id, 0), 1) for id in bucket.ids}
        for family in self.families:
            local = []
            for bucket in family.buckets:
                lacks_grads = len(bucket.arrivals) < len(bucket.ids)
                local.append((self._completed.get(bucket, num_buckets) / num_buckets, lacks_grads))
            reports = from_all_replicas(family.axes, local)
            for bucket, per_rank in zip(family.buckets, zip(*reports, strict=True), strict=True):
                time, _ = per_rank[0]
                is_late = not self.in_backward or any(is_late for _, is_late in per_rank)
                bucket.key = bucket.key._replace(time=time, is_late=is_late)
        self._has_to_learn = False
        self.launch_order.sort()


def grad_hook(grad_sync: GradSync, id: ParamId) -> Callable[[nn.Parameter], None]:
    """The hook of a parameter. Python's garbage collector does not see through it: it must not keep the wrapper."""
    weak = ref(grad_sync)

    def hook(param: nn.Parameter) -> None:
        if (found := weak()) is not None:
            found.accumulate(id, param)

    return hook
