"""The order in which reductions are launched: one order for all buckets that may use the same process group.

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
from typing import NamedTuple, Protocol
from weakref import WeakSet

from opt_distributed.buffers.bucket import BucketState, GradBucket
from opt_distributed.comm.collectives import group_of


class LaunchKey(NamedTuple):
    """The place of one reduction among all others; smaller ones are launched first."""

    is_late: bool  # launched by `finish` on every rank, because some rank may lack one of its gradients
    chunk: int  # negated number of the model chunk: backward reaches the last chunk first
    time: float  # when the bucket became complete on the first of its replicas, as a share of the chunk's buckets
    is_expert: bool
    number: int  # among the chunk's buckets of the family


class Chunk(Protocol):
    """The part of a chunk's `GradSync` that the order uses."""

    buckets: tuple[GradBucket, ...]
    keys: tuple[LaunchKey, ...]
    number: int  # of the chunk
    iteration: int
    is_started: bool  # whether all its buckets may be launched, complete or not
    groups: list[object]  # process groups of its reductions
    before_launch: Callable[[], None]  # starts collectives that precede reductions on every rank
    launch_order: "LaunchOrder"

    @property
    def may_launch_early(self) -> bool:
        """Whether complete buckets may be launched before `finish`."""
        ...


class LaunchOrder:
    """The order of launches of chunks whose iterations begin and end together, such as those of one optimizer.

    A bucket is launched once it and all buckets before it are complete; `launch_through` launches the rest. Nothing is
    launched early while a wrapped model outside of this order reduces over one of the process groups: its launches
    could come between these on one rank and after them on another.
    """

    def __init__(self, chunks: Sequence[Chunk]):
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
        """Sort buckets by the present keys of the chunks."""
        places = [(key, chunk, index) for chunk in self.chunks for index, key in enumerate(chunk.keys)]
        self._sequence = [(chunk, index) for _, chunk, index in sorted(places, key=lambda place: place[0])]

    @property
    def may_launch_early(self) -> bool:
        """Whether complete buckets are launched during backward on this rank.

        Another rank may keep a model alive that this one has dropped, and so launch nothing early.
        """
        return self.any_may_launch_early and self._has_its_groups_alone()

    @property
    def any_may_launch_early(self) -> bool:
        """Whether any rank may launch complete buckets during backward; the same on all ranks."""
        return all(chunk.may_launch_early for chunk in self.chunks)

    def launch_ready(self) -> None:
        """Launch, in order, complete buckets and those of started chunks, up to the first that is neither."""
        early = self.may_launch_early
        for chunk, index in self._pending():
            is_ready = early and chunk.buckets[index].is_complete and not chunk.keys[index].is_late
            if not (is_ready or chunk.is_started):
                return
            self._launch(chunk, index)

    def launch_through(self, last: Chunk) -> None:
        """Launch all buckets of `last`, complete or not, and, in order, all buckets that precede one of them."""
        pending = list(self._pending())
        own = [position for position, (chunk, _) in enumerate(pending) if chunk is last]
        for chunk, index in pending[: own[-1] + 1] if own else ():
            self._launch(chunk, index)

    def _pending(self) -> Iterator[tuple[Chunk, int]]:
        """Buckets that are not launched yet, in order, except those whose memory was freed."""
        for chunk, index in self._sequence:
            if chunk.buckets[index].state is BucketState.ACCUMULATING:
                yield chunk, index

    def _launch(self, chunk: Chunk, index: int) -> None:
        """Launch a bucket, after the previous one has advanced a stage: only one at a time has scratch memory."""
        if self._previous is not None:
            self._previous.advance()
        chunk.before_launch()
        self._previous = chunk.buckets[index]
        self._previous.launch(chunk.iteration)

    def _has_its_groups_alone(self) -> bool:
        others = _others(self.chunks)
        if others and not self._has_warned:
            self._has_warned = True
            gc.collect()  # unused models may be alive, because hooks and parameters form reference cycles
            others = _others(self.chunks)
            if others:
                warnings.warn(
                    f"overlap_grad_reduce=True: {len(others)} more wrapped model chunks reduce over the same process "
                    "groups, so that reductions start in finish_grad_sync() rather than in backward; pass the chunks "
                    "of one model to one get_optimizer call, or to opt_distributed.share_launch_order",
                    stacklevel=2,
                )
        return not others


def share_order(chunks: Iterable[Chunk]) -> None:
    """Give one order of launches to `chunks` and to all chunks that share an order with one of them.

    Raises:
        ValueError: two of them have the same number.
    """
    linked = {id(other): other for chunk in chunks for other in chunk.launch_order.chunks}
    order = LaunchOrder(list(linked.values()))
    for chunk in order.chunks:
        chunk.launch_order = order


# Process groups are global to a process, and so is the order of their collectives: the only state of this module.
_live: WeakSet[Chunk] = WeakSet()
_lock = threading.Lock()


def register(chunk: Chunk) -> None:
    """Register a chunk, so that other orders check its groups."""
    with _lock:
        _live.add(chunk)


def _others(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Live chunks outside of `chunks` that reduce over one of their groups."""
    with _lock:
        live = list(_live)
    groups = [group for chunk in chunks for group in chunk.groups]
    return [one for one in live if one not in chunks and any(group in groups for group in one.groups)]


def groups_of(buckets: Iterable[GradBucket]) -> list[object]:
    """The process groups of these reductions; a `Comm` without a process group is returned itself."""
    axes = {id(bucket.reduction.axes): bucket.reduction.axes for bucket in buckets}.values()
    return [group_of(comm) or comm for one in axes for comm in (one.dp, one.inter) if comm.size > 1]
