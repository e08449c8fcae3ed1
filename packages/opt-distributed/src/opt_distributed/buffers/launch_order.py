"""In which order reductions are launched: one order for all buckets that may meet on a process group.

Ranks of a group must launch the same collectives in the same order, or gradients of different parameters are summed.
Which gradients a rank has, and when, may differ between ranks, so the order may depend on neither. Each bucket has a
`LaunchKey` on which the ranks that reduce it agreed; every rank launches its buckets in ascending order of these keys.
A key belongs to the collective rather than to a rank, so that the orders of any two ranks agree, also where dense and
expert buckets travel over different groups that overlap.
"""

import gc
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakSet

from opt_distributed.buffers.bucket import BucketState, GradBucket
from opt_distributed.comm.collectives import group_of


class LaunchKey(NamedTuple):
    """The place of one reduction among all others; smaller ones are launched first."""

    is_late: bool  # launched by `finish` on every rank: some rank may lack one of its gradients
    chunk: int  # negated number of the model chunk: backward reaches the last chunk first
    time: float  # when the bucket became complete on the first of its replicas, as a share of the chunk's buckets
    is_expert: bool
    number: int  # among the chunk's buckets of the family


class Chunk(Protocol):
    """What the order reads of one chunk's `GradSync`."""

    buckets: tuple[GradBucket, ...]
    keys: tuple[LaunchKey, ...]
    number: int  # of the chunk
    iteration: int
    is_started: bool  # all its buckets may be launched, complete or not
    groups: list[object]  # process groups of its reductions
    before_launch: Callable[[], None]  # starts collectives that precede reductions on every rank
    launch_order: "LaunchOrder"

    @property
    def may_launch_early(self) -> bool:
        """Whether complete buckets may be launched before the reduction is finished."""
        ...


class LaunchOrder:
    """The launches of chunks whose iterations begin and end together, such as those of one optimizer.

    A bucket is launched once it and all before it are complete; `launch_through` launches what is left. Nothing is
    launched early while a wrapped model outside of this order reduces over one of the process groups: its launches
    could fall between these on one rank and after them on another.
    """

    def __init__(self, chunks: Sequence[Chunk]):
        numbers = sorted(chunk.number for chunk in chunks)
        if len(set(numbers)) < len(numbers):
            raise ValueError(
                f"model chunks have the numbers {numbers}; give each DistributedDataParallel a chunk= of its own"
            )
        self.chunks = tuple(chunks)
        self._previous: GradBucket | None = None
        self._has_warned = False
        self.sort()

    def sort(self) -> None:
        """Reads the chunks' keys again."""
        places = [(key, chunk, index) for chunk in self.chunks for index, key in enumerate(chunk.keys)]
        self._sequence = [(chunk, index) for _, chunk, index in sorted(places, key=lambda place: place[0])]

    @property
    def may_launch_early(self) -> bool:
        """Whether complete buckets are launched during backward; the same on all ranks."""
        return all(chunk.may_launch_early for chunk in self.chunks) and self._has_its_groups_alone()

    def launch_ready(self) -> None:
        """Launches, in order, complete buckets and those of started chunks, up to the first that is neither."""
        early = self.may_launch_early
        for chunk, index in self._pending():
            is_ready = early and chunk.buckets[index].is_complete and not chunk.keys[index].is_late
            if not (is_ready or chunk.is_started):
                return
            self._launch(chunk, index)

    def launch_through(self, last: Chunk) -> None:
        """Launches all buckets of `last`, complete or not, and in its place each bucket that precedes one of them."""
        pending = list(self._pending())
        own = [position for position, (chunk, _) in enumerate(pending) if chunk is last]
        for chunk, index in pending[: own[-1] + 1] if own else ():
            self._launch(chunk, index)

    def _pending(self) -> Iterator[tuple[Chunk, int]]:
        """Buckets that are not launched yet, in order; without those whose memory was given away."""
        for chunk, index in self._sequence:
            if chunk.buckets[index].state is BucketState.ACCUMULATING:
                yield chunk, index

    def _launch(self, chunk: Chunk, index: int) -> None:
        """Lets the previous bucket go on to its next stage first, so that only one at a time holds scratch memory."""
        if self._previous is not None:
            self._previous.advance()
        chunk.before_launch()
        self._previous = chunk.buckets[index]
        self._previous.launch(chunk.iteration)

    def _has_its_groups_alone(self) -> bool:
        others = _others(self.chunks)
        if others and not self._has_warned:
            self._has_warned = True
            gc.collect()  # models that are no longer used may only wait for it: hooks and parameters form cycles
            others = _others(self.chunks)
            if others:
                warnings.warn(
                    f"overlap_grad_reduce=True: {len(others)} more wrapped model chunks reduce over the same process "
                    "groups, so that reductions start when they are finished, not during backward; give chunks of one "
                    "model to one get_optimizer, or to opt_distributed.buffers.data_parallel.share_launch_order",
                    stacklevel=2,
                )
        return not others


def share_order(chunks: Iterable[Chunk]) -> None:
    """Gives chunks, and all that share an order with one of them, one order of launches.

    Raises:
        ValueError: two of them have the same number.
    """
    linked = {id(other): other for chunk in chunks for other in chunk.launch_order.chunks}
    order = LaunchOrder(list(linked.values()))
    for chunk in order.chunks:
        chunk.launch_order = order


# Process groups are global to a process, and so is the order of what travels over them: the one state of this module.
_live: WeakSet[Chunk] = WeakSet()
_lock = threading.Lock()


def register(chunk: Chunk) -> None:
    """Makes the chunks of other orders aware of this one."""
    with _lock:
        _live.add(chunk)


def _others(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Live chunks outside of `chunks` that reduce over one of their groups."""
    with _lock:
        live = list(_live)
    groups = [group for chunk in chunks for group in chunk.groups]
    return [one for one in live if one not in chunks and any(group in groups for group in one.groups)]


def groups_of(buckets: Iterable[GradBucket]) -> list[object]:
    """The process groups of these reductions; a `Comm` over something else stands for its group."""
    axes = {id(bucket.travel.axes): bucket.travel.axes for bucket in buckets}.values()
    return [group_of(comm) or comm for one in axes for comm in (one.dp, one.inter) if comm.size > 1]
