"""The planners of layouts: flat shards (ZeRO-1), replicated parameters, and whole parameters (layer-wise)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heapreplace
from math import prod

from opt_distributed.layout.layout import (
    SHARD_MULTIPLE,
    Bucket,
    Layout,
    ParamShape,
    Slot,
    bucket_multiple,
    check_plannable,
    round_up,
    start_multiple,
)


def flat_layout(
    params: Iterable[ParamShape],
    *,
    num_shards: int,
    bucket_size: int | None = None,  # a bucket closes once it has as many elements; None: one bucket
    shard_multiple: int = SHARD_MULTIPLE,
    pad_for_high_busbw: bool = False,
) -> Layout:
    """Parameters in reverse registration order, in buckets whose shards ignore parameter boundaries (ZeRO-1).

    Reverse, because backward produces the gradients of the last parameters first, so that bucket 0 is full, and
    reduced, first. A bucket closes once it holds ``bucket_size`` elements or more; a shared embedding closes the open
    bucket and is alone in its own. Starts are rounded to 64 elements, bucket ends to ``lcm(num_shards, 128)``, or
    with ``pad_for_high_busbw`` to ``lcm(num_shards, 128, 65536)``.

    Shard boundaries fall on multiples of ``shard_multiple`` elements, counted from the bucket's start and from each
    parameter's own start. With 64, an elementwise rule sees the same vectors at any world size and returns the same
    bits; with 1 the positions are exactly Megatron-Core's ``DistributedOptimizer``.

    Raises:
        LayoutError: see `check_plannable`; ``shard_multiple`` below 1.
    """
    shapes = tuple(params)
    check_plannable(shapes, num_shards=num_shards, bucket_size=bucket_size, shard_multiple=shard_multiple)
    run = _Run(
        start_multiple=start_multiple(shard_multiple),
        end_multiple=bucket_multiple(num_shards, shard_multiple=shard_multiple, pad_for_high_busbw=pad_for_high_busbw),
    )
    for param in reversed(shapes):
        if param.shared_embedding:
            run.close(at_aligned=True)
        run.place(param)
        if param.shared_embedding or (bucket_size is not None and run.numel >= bucket_size):
            run.close()
    run.close()
    return Layout(buckets=tuple(run.buckets), num_shards=num_shards)


def replicated_layout(params: Iterable[ParamShape], *, bucket_size: int | None = None) -> Layout:
    """Parameters in reverse registration order without padding, one shard: every rank owns everything.

    The gradients of a bucket are all-reduced. A shared embedding needs no bucket of its own, because nothing is cut.

    Raises:
        LayoutError: see `check_plannable`.
    """
    shapes = tuple(params)
    check_plannable(shapes, num_shards=1, bucket_size=bucket_size, shard_multiple=1)
    run = _Run(start_multiple=1, end_multiple=1)
    for param in reversed(shapes):
        run.place(param)
        if bucket_size is not None and run.numel >= bucket_size:
            run.close()
    run.close()
    return Layout(buckets=tuple(run.buckets), num_shards=1)


@dataclass(slots=True, kw_only=True)
class _Run:
    """The buckets closed so far, and the slots of the open one."""

    start_multiple: int
    end_multiple: int
    buckets: list[Bucket] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    start: int = 0

    @property
    def end(self) -> int:
        return self.slots[-1].stop if self.slots else self.start

    @property
    def numel(self) -> int:
        return self.end - self.start

    def place(self, param: ParamShape) -> None:
        start = round_up(self.end, self.start_multiple)
        self.slots.append(Slot(param.id, start, start + param.numel))

    def close(self, *, at_aligned: bool = False) -> None:
        """Close the open bucket, if it holds a parameter.

        ``at_aligned`` counts the gap before the next start as part of ``numel_unpadded``, as Megatron-Core does for a
        bucket that a shared embedding cuts short.
        """
        if not self.slots:
            return
        unpadded = round_up(self.numel, self.start_multiple) if at_aligned else self.numel
        stop = round_up(self.end, self.end_multiple)
        self.buckets.append(Bucket(slots=tuple(self.slots), start=self.start, stop=stop, numel_unpadded=unpadded))
        self.slots, self.start = [], stop


MIN_LARGEST = 2
"""A bucket holds this many times the elements of its largest parameter (or `num_shards` times, if that is less).

The owner of this parameter exchanges it in addition to its chunk, while other ranks wait: with 2, for at most half the
time of the reduction or gather itself. A larger number takes less time, but makes fewer buckets that overlap.
"""


def update_cost(shape: tuple[int, ...]) -> int:
    """Relative cost of a matrix rule: m·n·min(m, n), the multiplications of a Newton-Schulz product; a vector's numel.

    The cost of a stack of matrices is the cost of one times their number.
    """
    if len(shape) < 2:
        return prod(shape)
    *stack, m, n = shape
    return prod(stack) * max(m, n) * min(m, n) ** 2


def whole_layout(
    params: Iterable[ParamShape],
    *,
    num_shards: int,
    bucket_size: int | None = None,  # minimum elements of a bucket; None: one bucket
    shard_multiple: int = SHARD_MULTIPLE,
    pad_for_high_busbw: bool = False,
) -> Layout:
    """Assign whole parameters to ranks, in reverse registration order, so that all ranks have similar update costs.

    Parameters become a bucket once they hold ``bucket_size`` elements and `MIN_LARGEST` times the largest of them. In
    a bucket, they are assigned in descending order of cost, each to the rank with the least cost so far (over all
    buckets) among those that own no more than their share of the elements. So no rank owns more than its share and one
    parameter. A rank's parameters follow each other; shards differ in size, and many are empty where a bucket has
    fewer parameters than there are ranks. `imbalance` measures how uneven the costs are. Starts are rounded to 64
    elements, bucket ends as in `flat_layout`.

    Raises:
        LayoutError: see `check_plannable`.
    """
    shapes = tuple(params)
    check_plannable(shapes, num_shards=num_shards, bucket_size=bucket_size, shard_multiple=shard_multiple)
    multiple = start_multiple(shard_multiple)
    pack = _Packing(
        num_shards=num_shards,
        start_multiple=multiple,
        end_multiple=bucket_multiple(num_shards, shard_multiple=shard_multiple, pad_for_high_busbw=pad_for_high_busbw),
        share=sum(round_up(param.numel, multiple) for param in shapes) / num_shards,
    )
    for chunk in _chunks(shapes, num_shards=num_shards, bucket_size=bucket_size):
        pack.close(chunk)
    return Layout(buckets=tuple(pack.buckets), num_shards=num_shards)


def imbalance(layout: Layout, params: Iterable[ParamShape]) -> float:
    """The largest cost of a shard divided by the mean, 1.0 at best: how much longer updates take than if balanced."""
    costs = {param.id: update_cost(param.shape) for param in params}
    loads = [sum(costs[owned.piece.id] for owned in layout.owned(rank)) for rank in range(layout.num_shards)]
    return max(loads) * layout.num_shards / sum(loads) if sum(loads) else 1.0


def _chunks(params: Sequence[ParamShape], *, num_shards: int, bucket_size: int | None) -> Iterator[list[ParamShape]]:
    """The parameters of each bucket, in reverse registration order; a shared embedding is alone in its own."""
    chunk: list[ParamShape] = []
    numel = largest = 0
    for param in reversed(params):
        if chunk and param.shared_embedding:
            yield chunk
            chunk, numel, largest = [], 0, 0
        chunk.append(param)
        numel, largest = numel + param.numel, max(largest, param.numel)
        is_full = bucket_size is not None and numel >= max(bucket_size, min(num_shards, MIN_LARGEST) * largest)
        if is_full or param.shared_embedding:
            yield chunk
            chunk, numel, largest = [], 0, 0
    if chunk:
        yield chunk


@dataclass(slots=True, kw_only=True)
class _Packing:
    """The buckets closed so far, and the cost and elements of every rank over all of them."""

    num_shards: int
    start_multiple: int
    end_multiple: int
    share: float  # elements of all parameters, divided by the ranks
    buckets: list[Bucket] = field(default_factory=list)
    numels: list[int] = field(init=False)
    costs: list[int] = field(init=False)
    cheapest: list[tuple[int, int]] = field(init=False)  # heap of (cost, rank); ranks with more than `share` leave it

    def __post_init__(self) -> None:
        self.numels, self.costs = [0] * self.num_shards, [0] * self.num_shards
        self.cheapest = [(0, rank) for rank in range(self.num_shards)]

    def close(self, chunk: Sequence[ParamShape]) -> None:
        """Pack ``chunk`` into the next bucket."""
        order = sorted(chunk, key=lambda param: (update_cost(param.shape), param.numel), reverse=True)
        owners = [self._assign(param) for param in order]
        position = start = self.buckets[-1].stop if self.buckets else 0
        slots, cuts = [], [start] * (self.num_shards + 1)
        for index in sorted(range(len(order)), key=owners.__getitem__):
            slots.append(Slot(order[index].id, position, position + order[index].numel))
            position = round_up(slots[-1].stop, self.start_multiple)
            cuts[owners[index] + 1] = position
        for rank in range(self.num_shards):
            cuts[rank + 1] = max(cuts[rank : rank + 2])
        stop = start + round_up(position - start, self.end_multiple)
        unpadded = sum(param.numel for param in chunk)
        bucket = Bucket(slots=tuple(slots), start=start, stop=stop, numel_unpadded=unpadded)
        if cuts[:-1] != list(bucket.chunk_bounds(self.num_shards))[:-1]:
            bucket = replace(bucket, cuts=tuple(cuts))
        self.buckets.append(bucket)

    def _assign(self, param: ParamShape) -> int:
        """Return the owner. Of a shared embedding it is rank 0, because pipeline stages that share it must agree."""
        rank = 0 if param.shared_embedding else self._cheapest()
        self.numels[rank] += round_up(param.numel, self.start_multiple)
        self.costs[rank] += update_cost(param.shape)
        return rank

    def _cheapest(self) -> int:
        """The rank of least cost so far that owns no more than its share; not all ranks can own more."""
        while True:
            cost, rank = self.cheapest[0]
            if self.numels[rank] > self.share:
                heappop(self.cheapest)
            elif cost < self.costs[rank]:
                heapreplace(self.cheapest, (self.costs[rank], rank))
            else:
                return rank
