"""`GradSync`: reduces all buckets in the step, or each in backward as soon as it is complete."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import NamedTuple
from weakref import ref

from torch import Tensor, nn

from opt_distributed.buffers.binding import (
    GradientError,
    SparseGradientError,
    UnusableGradientError,
    adopt_main_grad_,
    take_grad_,
)
from opt_distributed.buffers.bucket import GradBucket
from opt_distributed.buffers.grad_checks import LargeGrads, are_bad
from opt_distributed.buffers.launch_order import LaunchKey, LaunchOrder, groups_of, register
from opt_distributed.comm.groups import from_all_replicas
from opt_paramgroups import ParamId


class Reduces(Enum):
    """When a model chunk's buckets are reduced."""

    IN_STEP = auto()  # all in `finish`
    IN_BACKWARD = auto()  # each as soon as its gradients are complete, from the second iteration on


class _Seen(NamedTuple):
    """What one rank observed of one bucket in the first iteration."""

    time: float  # when it became complete, as a share of the chunk's buckets
    lacks_gradient: bool  # whether a parameter received none


def _nothing() -> None:
    """Nothing must precede a reduction."""


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
        reduces: Reduces,
        learns: bool,
        number: int = 0,
        before_launch: Callable[[], None] = _nothing,
    ):
        self.buckets = tuple(buckets)
        self.reduces = reduces
        self.number = number  # of the chunk
        self.before_launch = before_launch
        self.groups = groups_of(buckets)
        self.is_last_microbatch = True
        self.is_started = False
        self.iteration = 1  # reductions begun, counted from 1
        self._has_to_learn = learns
        self.large_grads = [LargeGrads(of_family) for of_family in _measured(self.buckets)]
        self._bucket_of = {id: index for index, bucket in enumerate(self.buckets) for id in bucket.ids}
        self._completed: dict[int, int] = {}  # in this iteration: buckets, and how many were complete before
        self._has_run = False  # whether a pass of this iteration may have launched buckets on some rank
        self._finished = False
        self._refused: list[UnusableGradientError] = []  # in this iteration, because gradients are too large
        self.keys = tuple(self._key(index) for index in range(len(self.buckets)))
        self.launch_order = LaunchOrder([self])
        register(self)

    @property
    def order(self) -> tuple[int, ...]:
        """Indices in `buckets`, in the order of their launches."""
        return tuple(sorted(range(len(self.buckets)), key=self.keys.__getitem__))

    @property
    def may_launch_early(self) -> bool:
        """Whether complete buckets may be launched before `finish`; the same on all ranks."""
        return self.reduces is Reduces.IN_BACKWARD and not self._has_to_learn and not self._finished

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients inside: for all microbatches except the last."""
        before, self.is_last_microbatch = self.is_last_microbatch, False
        try:
            yield
        finally:
            self.is_last_microbatch = before

    def check_accumulating(self, id: ParamId) -> None:
        """Raise GradientError if a gradient of this parameter may not be added now."""
        self.buckets[self._bucket_of[id]].check_accumulating(id)

    def note_forward(self) -> None:
        """Note a forward pass, whose backward may launch buckets on this rank or another."""
        self._has_run = True

    def note(self, id: ParamId) -> None:
        """Note that a gradient was added to the buffer. In the last microbatch, launch buckets that are ready."""
        if not self.is_last_microbatch:
            return
        self._has_run = True
        index = self._bucket_of[id]
        bucket = self.buckets[index]
        bucket.note(id)
        if bucket.is_complete:
            self._completed.setdefault(index, len(self._completed))
            self.launch_order.launch_ready()

    def refuse(self, id: ParamId, problem: UnusableGradientError) -> None:
        """Note that a gradient cannot be used. `finish` raises, after the reductions that other ranks take part in."""
        bucket = self.buckets[self._bucket_of[id]]
        bucket.problem = bucket.problem or problem

    def start(self) -> None:
        """Launch every bucket, complete or not, as soon as all buckets before it are launched."""
        if not self._finished:
            self._check_here()
            self.is_started = True
            self.launch_order.launch_ready()

    def reduce_everywhere(self) -> None:
        """Let this iteration's reductions give every rank the whole gradients, in all chunks of the launch order.

        Raises:
            GradientError: a reduction to shards has begun.
        """
        buckets = [bucket for chunk in self.launch_order.chunks for bucket in chunk.buckets]
        for bucket in buckets:
            bucket.check_reduces_everywhere()
        for bucket in buckets:
            bucket.memory.reduces_everywhere = bucket.memory.layout.num_shards > 1

    def finish(self) -> None:
        """Complete the reduction of this iteration's gradients. A second call does nothing.

        Raises:
            CollectiveError: a collective failed, or exceeded the timeout of its group.
            UnusableGradientError: gradients must not be used (`GradBucket.problem`). All reductions are complete, so
                that no other rank waits for this one.
        """
        if not self._finished:
            self._check_here()
            self.launch_order.launch_through(self)
        for index in self.order:
            self.buckets[index].finish()
        if self._has_to_learn and not self._finished:
            self._learn()
        if not self._finished:
            self._refused = [problem for large in self.large_grads if (problem := large.verdict()) is not None]
            self._judge_nonfinite()
        self._finished = True
        problems = [self.buckets[index].problem for index in self.order]
        for problem in (*problems, *self._refused):
            if problem is not None:
                raise problem

    def begin(self) -> None:
        """Begin an iteration, in which gradients may accumulate again. Waits for pending reductions.

        If the gradients of the last iteration are dropped without a reduction, buckets may have been launched on this
        rank but not on another, so that all buckets must be launched first.

        Raises:
            GradientError: another rank drops another iteration.
        """
        if self._has_run and self.launch_order.any_may_launch_early:
            self.launch_order.launch_through(self)
            self._check_dropped()
        for index in self.order:
            self.buckets[index].begin()
        self.iteration += self._finished
        self._refused = []
        self._completed, self._finished, self._has_run, self.is_started = {}, False, False, False

    def _check_dropped(self) -> None:
        """Compare between replicas which iteration is dropped.

        If only this rank drops one, its reductions met those of the next iteration on other ranks, whose gradients are
        wrong. This exchange then meets the exchange of their step, which fails before it updates anything.
        """
        for axes in {id(bucket.reduction.axes): bucket.reduction.axes for bucket in self.buckets}.values():
            dropped = from_all_replicas(axes, (self.number, self.iteration))
            if any(other != dropped[0] for other in dropped):
                raise GradientError(
                    f"ranks dropped the gradients of different iterations (chunk, iteration): {dropped}; run every "
                    "training forward on all ranks, and evaluate on one rank with model.eval() or torch.no_grad()"
                )

    def _judge_nonfinite(self) -> None:
        checked = [bucket for index in self.order if (bucket := self.buckets[index]).nonfinite is not None]
        checks = [bucket.nonfinite for bucket in checked if bucket.nonfinite is not None]
        if not checks:
            return
        for bucket, check, is_bad in zip(checked, checks, are_bad(checks, checked[0].memory.queues), strict=True):
            if is_bad:
                bucket.problem = bucket.problem or check.problem()

    def _check_here(self) -> None:
        for bucket in self.buckets:
            bucket.check_here()

    def _key(self, index: int, *, time: float = 0.0, is_late: bool = False) -> LaunchKey:
        is_expert = self.buckets[index].reduction.is_expert
        is_late = is_late or self.reduces is Reduces.IN_STEP
        return LaunchKey(is_late, -self.number, time, is_expert, index)

    def _learn(self) -> None:
        for bucket in self.buckets:
            bucket.learn()
        keys = list(self.keys)
        for is_expert in (False, True):
            family = [index for index, bucket in enumerate(self.buckets) if bucket.reduction.is_expert == is_expert]
            if not family:
                continue
            axes = self.buckets[family[0]].reduction.axes
            reports: list[list[_Seen]] = from_all_replicas(axes, [self._seen(index) for index in family])
            for index, seen in zip(family, zip(*reports, strict=True), strict=True):
                keys[index] = self._key(index, time=seen[0].time, is_late=any(one.lacks_gradient for one in seen))
        self.keys = tuple(keys)
        self._has_to_learn = False
        self.launch_order.sort()

    def _seen(self, index: int) -> _Seen:
        position = self._completed.get(index, len(self.buckets))
        return _Seen(position / len(self.buckets), self.buckets[index].lacks_gradient)


def _measured(buckets: Sequence[GradBucket]) -> Iterator[list[GradBucket]]:
    """Buckets whose norms are checked, by family: the same on all replicas of a family."""
    for is_expert in (False, True):
        of_family = [one for one in buckets if one.reduction.check_for_large and one.reduction.is_expert == is_expert]
        if of_family:
            yield of_family


class GradHook:
    """Adds the gradient of a parameter to its accumulator, and notes that it is there.

    Python's garbage collector does not see through hooks of tensors, so this one must not keep the wrapper alive.
    """

    def __init__(self, grad_sync: GradSync, id: ParamId, accumulator: Tensor):
        self._grad_sync = ref(grad_sync)
        self._id, self._accumulator = id, accumulator

    def __call__(self, param: Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        grad_sync = self._grad_sync()
        if grad_sync is None:  # the wrapper is gone
            return
        grad_sync.check_accumulating(self._id)
        adopt_main_grad_(param, self._accumulator, str(self._id))
        try:
            take_grad_(param, str(self._id))
        except SparseGradientError as error:
            param.grad = None
            grad_sync.refuse(self._id, error)
        grad_sync.note(self._id)
