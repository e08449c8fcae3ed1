"""The whole-parameter planner (layer-wise): every parameter is inside one shard, and shards have similar costs."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import prod
from typing import NamedTuple

from opt_distributed.layout.layout import Bucket, Layout, ParamShape, Slot, check_plannable
from opt_distributed.layout.padding import SHARD_MULTIPLE, round_up, start_multiple, whole_shard_multiple

MAX_OVERFILL = 1.3
"""A shard takes up to this many times its fair share of a bucket's elements, if that balances costs better."""

MIN_FILL = 0.9
"""A bucket closes once it holds this part of num_shards times the elements of its largest parameter."""


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
    """Assign whole parameters to shards, in reverse registration order, so that all ranks have similar update costs.

    A chunk of parameters becomes a bucket once it holds ``bucket_size`` elements and enough to fill every shard, and
    the next parameter would lengthen its shards. Inside a bucket, parameters are assigned in descending order of cost,
    each to the shard with the least cost so far (over all buckets) that is not overfull. All shards of a bucket are
    as long as its fullest one, so that one in-place all-gather publishes it. `imbalance` measures how uneven the
    costs are. Starts are rounded to 64 elements.

    Raises:
        LayoutError: see `check_plannable`.
    """
    shapes = tuple(params)
    check_plannable(shapes, num_shards=num_shards, bucket_size=bucket_size, shard_multiple=shard_multiple)
    pack = _Packing(
        num_shards=num_shards,
        start_multiple=start_multiple(shard_multiple),
        shard_multiple=whole_shard_multiple(
            num_shards, shard_multiple=shard_multiple, pad_for_high_busbw=pad_for_high_busbw
        ),
        costs=[0] * num_shards,
    )
    for chunk in _chunks(shapes, num_shards=num_shards, bucket_size=bucket_size, multiple=pack.start_multiple):
        pack.close(chunk)
    return Layout(buckets=tuple(pack.buckets), num_shards=num_shards)


def imbalance(layout: Layout, params: Iterable[ParamShape]) -> float:
    """The largest cost of a shard divided by the mean, 1.0 at best: how much longer updates take than if balanced."""
    costs = {param.id: update_cost(param.shape) for param in params}
    loads = [sum(costs[owned.piece.id] for owned in layout.owned(rank)) for rank in range(layout.num_shards)]
    return max(loads) * layout.num_shards / sum(loads) if sum(loads) else 1.0


def _chunks(
    params: Sequence[ParamShape], *, num_shards: int, bucket_size: int | None, multiple: int
) -> Iterator[list[ParamShape]]:
    """The parameters of each bucket, in reverse registration order; a shared embedding is alone in its own."""
    chunk = _Chunk(num_shards=num_shards, multiple=multiple)
    for param in reversed(params):
        if chunk.params and (param.shared_embedding or chunk.is_done(bucket_size, param)):
            yield chunk.params
            chunk = _Chunk(num_shards=num_shards, multiple=multiple)
        if param.shared_embedding:
            yield [param]
        else:
            chunk.add(param)
    if chunk.params:
        yield chunk.params


@dataclass(slots=True, kw_only=True)
class _Chunk:
    """The parameters of a bucket so far, and how full shards would be if each went to the emptiest one on arrival."""

    num_shards: int
    multiple: int
    params: list[ParamShape] = field(default_factory=list)
    cursors: list[int] = field(default_factory=list)  # heap of the shards in use; the others are empty
    numel: int = 0
    largest: int = 0
    fullest: int = 0

    @property
    def emptiest(self) -> int:
        return self.cursors[0] if len(self.cursors) == self.num_shards else 0

    def add(self, param: ParamShape) -> None:
        end = round_up(self.emptiest, self.multiple) + param.numel
        if len(self.cursors) == self.num_shards:
            heapreplace(self.cursors, end)
        else:
            heappush(self.cursors, end)
        self.params.append(param)
        self.numel += param.numel
        self.largest, self.fullest = max(self.largest, param.numel), max(self.fullest, end)

    def is_done(self, bucket_size: int | None, following: ParamShape) -> bool:
        """Whether the chunk is large enough, and the following parameter would lengthen its shards."""
        if bucket_size is None or self.numel < max(bucket_size, int(self.num_shards * self.largest * MIN_FILL)):
            return False
        return round_up(self.emptiest, self.multiple) + following.numel > round_up(self.fullest, self.multiple)


class _Placed(NamedTuple):
    """A parameter and its place inside the open bucket."""

    shard: int
    offset: int  # from the shard's start
    param: ParamShape

    @property
    def stop(self) -> int:
        return self.offset + self.param.numel


@dataclass(slots=True, kw_only=True)
class _Packing:
    """The buckets closed so far, and the cost of every shard over all of them."""

    num_shards: int
    start_multiple: int
    shard_multiple: int
    costs: list[int]
    buckets: list[Bucket] = field(default_factory=list)

    def close(self, chunk: Sequence[ParamShape]) -> None:
        """Pack ``chunk`` into the next bucket."""
        alone = len(chunk) == 1 and chunk[0].shared_embedding
        placed = [self._at_shard_0(chunk[0])] if alone else self._deal(chunk)
        start = self.buckets[-1].stop if self.buckets else 0
        shard_numel = round_up(max(at.stop for at in placed), self.shard_multiple)
        slots = []
        for at in placed:
            origin = start + at.shard * shard_numel
            slots.append(Slot(at.param.id, origin + at.offset, origin + at.stop))
        slots.sort(key=lambda slot: (slot.start, slot.stop))
        unpadded = sum(param.numel for param in chunk)
        stop = start + self.num_shards * shard_numel
        self.buckets.append(Bucket(slots=tuple(slots), start=start, stop=stop, numel_unpadded=unpadded))

    def _at_shard_0(self, param: ParamShape) -> _Placed:
        """Place `param` in shard 0: pipeline stages that share an embedding must agree on its owner."""
        self.costs[0] += update_cost(param.shape)
        return _Placed(0, 0, param)

    def _deal(self, chunk: Sequence[ParamShape]) -> list[_Placed]:
        """Place parameters in descending order of cost: each in the cheapest shard it fits in, else in the emptiest."""
        order = sorted(chunk, key=lambda param: (update_cost(param.shape), param.numel), reverse=True)
        shards = _Shards(
            capacity=MAX_OVERFILL * sum(param.numel for param in chunk) / self.num_shards,
            multiple=self.start_multiple,
            cursors=[0] * self.num_shards,
            costs=self.costs,
            by_cost=[(cost, shard) for shard, cost in enumerate(self.costs)],
            by_fill=[(0, shard) for shard in range(self.num_shards)],
        )
        heapify(shards.by_cost)
        return [shards.place(param) for param in order]


@dataclass(slots=True, kw_only=True)
class _Shards:
    """How full and how costly each shard of one bucket is, while parameters are assigned to them."""

    capacity: float
    multiple: int
    cursors: list[int]
    costs: list[int]  # over all buckets; updated
    by_cost: list[tuple[int, int]]  # heap of (cost, shard); an entry is stale once the shard has grown
    by_fill: list[tuple[int, int]]  # heap of (cursor, shard); likewise
    set_aside: list[int] = field(default_factory=list)  # shards out of `by_cost`, too full for ...
    aside_numel: int = 0  # ... this many elements

    def place(self, param: ParamShape) -> _Placed:
        """Place ``param`` in the cheapest shard that it fits in, else in the emptiest."""
        emptiest = self._emptiest()
        if not self._fits(emptiest, param.numel):
            return self._put(param, emptiest)
        if param.numel < self.aside_numel:
            self._take_back()
        shard = self._cheapest()
        while not self._fits(shard, param.numel):  # ends: the emptiest shard fits, so it is not set aside
            self.set_aside.append(shard)
            self.aside_numel = param.numel
            shard = self._cheapest()
        placed = self._put(param, shard)
        heappush(self.by_cost, (self.costs[shard], shard))
        return placed

    def _take_back(self) -> None:
        """Consider every shard again. This is rare, because models have few different sizes, so planning is linear."""
        for shard in self.set_aside:
            heappush(self.by_cost, (self.costs[shard], shard))
        self.set_aside, self.aside_numel = [], 0

    def _cheapest(self) -> int:
        """Remove the shard of least cost from the heap."""
        cost, shard = heappop(self.by_cost)
        while cost != self.costs[shard]:
            heappush(self.by_cost, (self.costs[shard], shard))
            cost, shard = heappop(self.by_cost)
        return shard

    def _emptiest(self) -> int:
        while self.by_fill[0][0] != self.cursors[self.by_fill[0][1]]:
            heappop(self.by_fill)
        return self.by_fill[0][1]

    def _fits(self, shard: int, numel: int) -> bool:
        return round_up(self.cursors[shard], self.multiple) + numel <= self.capacity

    def _put(self, param: ParamShape, shard: int) -> _Placed:
        offset = round_up(self.cursors[shard], self.multiple)
        self.cursors[shard] = offset + param.numel
        self.costs[shard] += update_cost(param.shape)
        heappush(self.by_fill, (self.cursors[shard], shard))
        return _Placed(shard, offset, param)
