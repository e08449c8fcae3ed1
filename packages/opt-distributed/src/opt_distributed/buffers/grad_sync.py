"""When gradients are reduced: all buckets in the step, or each in backward as soon as it is complete."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import NamedTuple

from opt_distributed.buffers.agreement import from_all_replicas
from opt_distributed.buffers.bucket import GradBucket
from opt_distributed.comm.groups import Axes
from opt_paramgroups import ParamId


class Reduces(Enum):
    """When a model chunk's buckets are reduced."""

    IN_STEP = auto()  # all of them, when the reduction is finished
    IN_BACKWARD = auto()  # each as soon as its gradients are complete, from the second iteration on


class _Told(NamedTuple):
    """What a rank saw in the first iteration."""

    order: tuple[int, ...]  # buckets, as they became complete
    doubtful: frozenset[int]  # buckets with a parameter that had no gradient


class GradSync:
    """Reduces the buckets of one model chunk, in one order on all ranks.

    Ranks may differ in which gradients they have, and when; a collective they may not. So buckets are launched in a
    fixed order only, each once it *and all before it* are complete, and `finish` launches the rest. The first
    iteration launches nothing early: it learns how many gradients each parameter gets in the last microbatch, and in
    what order buckets become complete. All ranks then follow what the first rank saw, with buckets last that lacked a
    gradient on any rank: they would hold up the others. Without `axes` nothing overlaps, and nothing is learned.
    """

    def __init__(self, buckets: Sequence[GradBucket], *, reduces: Reduces, axes: Axes | None):
        self.buckets = tuple(buckets)
        self.reduces = reduces
        self.order = tuple(range(len(self.buckets)))  # indices in `buckets`; until learned, as given
        self.is_last_microbatch = True
        self.iteration = 1  # reductions begun, counted from 1
        self._axes = axes  # the replicas that have to agree on an order; None once they have
        self._bucket_of = {id: index for index, bucket in enumerate(self.buckets) for id in bucket.ids}
        self._completed: list[int] = []  # in this iteration
        self._launched = 0  # buckets of `order`
        self._finished = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate: for all microbatches but the last."""
        before, self.is_last_microbatch = self.is_last_microbatch, False
        try:
            yield
        finally:
            self.is_last_microbatch = before

    def check_accumulating(self, id: ParamId) -> None:
        """Raises GradientError where a gradient of this parameter may not be added now."""
        self.buckets[self._bucket_of[id]].check_accumulating(id)

    def note(self, id: ParamId) -> None:
        """A gradient has been added to the buffer; in the last microbatch this may launch buckets."""
        if not self.is_last_microbatch:
            return
        index = self._bucket_of[id]
        bucket = self.buckets[index]
        bucket.note(id)
        if bucket.is_complete:
            self._completed.append(index)
            if self.reduces is Reduces.IN_BACKWARD and self._axes is None:
                self._launch_complete()

    def start(self) -> None:
        """Launches every bucket that is not under way yet, complete or not."""
        if not self._finished:
            while self._launched < len(self.order):
                self._launch_next()

    def finish(self) -> None:
        """Completes the reduction of this iteration's gradients; a second call changes nothing.

        Raises:
            CollectiveError: a collective failed, or ran into the group's timeout.
        """
        self.start()
        for index in self.order:
            self.buckets[index].finish()
        if self._axes is not None and not self._finished:
            self._learn(self._axes)
            self._axes = None
        self._finished = True

    def begin(self) -> None:
        """A new iteration: gradients may accumulate again. Waits for what is under way."""
        for index in self.order:
            self.buckets[index].begin()
        self.iteration += self._finished
        self._completed, self._launched, self._finished = [], 0, False

    def _launch_complete(self) -> None:
        while self._launched < len(self.order) and self.buckets[self.order[self._launched]].is_complete:
            self._launch_next()

    def _launch_next(self) -> None:
        """The bucket before goes on to its next stage first, so that only one at a time holds memory of its own."""
        if self._launched:
            self.buckets[self.order[self._launched - 1]].advance()
        self.buckets[self.order[self._launched]].launch(self.iteration)
        self._launched += 1

    def _learn(self, axes: Axes) -> None:
        for bucket in self.buckets:
            bucket.learn()
        complete = set(self._completed)
        seen = (*dict.fromkeys(self._completed), *(index for index in self.order if index not in complete))
        doubtful = frozenset(i for i, bucket in enumerate(self.buckets) if bucket.arrivals.keys() != set(bucket.ids))
        told: list[_Told] = from_all_replicas(axes, _Told(seen, doubtful))
        held_up = frozenset[int]().union(*(one.doubtful for one in told))
        first = told[0].order
        self.order = (*(i for i in first if i not in held_up), *(i for i in first if i in held_up))
