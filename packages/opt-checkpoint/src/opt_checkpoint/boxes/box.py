"""Boxes: axis-aligned blocks of a global tensor; those that make up a flat range, and what two sets of them share.

Integers only. A flat range of a row-major block is a run of elements. In an n-d block it equals at most `2n-1` boxes,
each a contiguous slice of the run. The shard of a bucket is therefore stored by parameter without a copy, a gather or a
message.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from opt_checkpoint.state.sharded import Shape, ShardedTensor, flat_bounds


class Box(NamedTuple):
    """The block of `sizes` that starts at `offsets`."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def moved(self, by: Shape) -> Box:
        """The same box with `by` added to its offsets."""
        return Box(tuple(o + b for o, b in zip(self.offsets, by)), self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The elements that both boxes have; None if there are none."""
        start = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets))
        sizes = tuple(
            min(a + m, b + n) - s for a, m, b, n, s in zip(self.offsets, self.sizes, other.offsets, other.sizes, start)
        )
        return None if any(n <= 0 for n in sizes) else Box(start, sizes)

    def part_of(self, values: Tensor, part: Box) -> Tensor:
        """The values of a box within this one, as a view of the values of this one."""
        for axis, (low, base, size) in enumerate(zip(part.offsets, self.offsets, part.sizes)):
            values = values.narrow(axis, low - base, size)
        return values


class FlatBox(NamedTuple):
    """A box, and the run `[start, stop)` of the flattened local data that holds it."""

    box: Box
    start: int
    stop: int


def row_major_strides(shape: Shape) -> Shape:
    """Elements from one index to the next along every axis of a contiguous tensor of `shape`."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def cut_flat_range(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Cut elements `[start, stop)` of a block of `shape` into as few boxes as possible, each a row-major run.

    Each box is the largest possible at its position: a slice of the outermost axis that begins there and fits.

    Args:
        shape: shape of the block; `()` is one element.
        start: first element, counted row-major.
        stop: one past the last element, at most the block's size.

    Yields:
        Boxes in row-major order, never empty, at most `max(1, 2 * len(shape) - 1)` of them.
    """
    strides, position = row_major_strides(shape), start
    if not shape and start < stop:
        yield Box((), ())
        return
    while position < stop:
        axis = next(d for d, s in enumerate(strides) if position % s == 0 and position + s <= stop)
        stride, index = strides[axis], tuple(position // s % n for s, n in zip(strides, shape))
        rows = min((stop - position) // stride, shape[axis] - index[axis])
        offsets = index[: axis + 1] + (0,) * (len(shape) - axis - 1)
        yield Box(offsets, (1,) * axis + (rows,) + shape[axis + 1 :])
        position += rows * stride


def boxes_of(shard: ShardedTensor) -> Iterator[FlatBox]:
    """The boxes of the global tensor that a shard holds, each with the run of its flattened data.

    Empty shards have no box: chunks of one tensor must have distinct offsets on disk, and an empty one would share its.
    """
    if shard.flattened_range is None:
        box = Box(shard.global_offset, shard.global_block_shape)
        if box.numel:
            yield FlatBox(box, 0, box.numel)
        return
    prepended, position = (1,) * shard.prepend_axis_num, 0
    for local in cut_flat_range(shard.local_shape, *flat_bounds(shard.flattened_range)):
        whole = Box((0,) * shard.prepend_axis_num + local.offsets, prepended + local.sizes)
        yield FlatBox(whole.moved(shard.global_offset), position, position + whole.numel)
        position += whole.numel


def split_rows(box: Box, parts: int) -> Iterator[Box]:
    """Cut a box into about `parts` pieces along its first axis longer than 1. Each is one run of the box's elements."""
    axis = next((d for d, n in enumerate(box.sizes) if n > 1), None)
    if axis is None or parts <= 1:
        yield box
        return
    rows = box.sizes[axis]
    edges = sorted({rows * k // parts for k in range(parts + 1)})
    for low, high in pairwise(edges):
        offsets = tuple(o + low if d == axis else o for d, o in enumerate(box.offsets))
        yield Box(offsets, tuple(high - low if d == axis else n for d, n in enumerate(box.sizes)))


class Copy(NamedTuple):
    """A box of values that a stored chunk and a wanted box share.

    Args:
        chunk: index of the stored box.
        from_offsets: start of the shared values, relative to the stored box.
        to_offsets: their start relative to the wanted box.
        sizes: their number along each axis.
    """

    chunk: int
    from_offsets: Shape
    to_offsets: Shape
    sizes: Shape


class StoredBoxes:
    """Stored boxes sorted along one axis, so that a wanted box is compared only with those near it.

    Args:
        boxes: boxes of one tensor.
    """

    __slots__ = ("_axis", "_boxes", "_longest", "_order", "_starts")

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes, self._order = boxes, list(range(len(boxes)))
        self._axis: int | None = None  # a single box and boxes without axes are always compared
        if len(boxes) > 1 and boxes[0].sizes:
            # The axis with the most distinct offsets separates boxes best.
            places = [len({box.offsets[d] for box in boxes}) for d in range(len(boxes[0].sizes))]
            axis = self._axis = places.index(max(places))
            self._order.sort(key=lambda i: boxes[i].offsets[axis])
            self._starts = [boxes[i].offsets[axis] for i in self._order]
            self._longest = max(box.sizes[axis] for box in boxes)

    def copies_to(self, wanted: Box) -> Iterator[Copy]:
        """The overlap of `wanted` with each stored box that it overlaps, in sorted order."""
        for number in self._near(wanted):
            stored = self._boxes[number]
            shared = stored.overlap(wanted)
            if shared is not None:
                yield Copy(number, _minus(shared, stored), _minus(shared, wanted), shared.sizes)

    def first_overlap(self) -> tuple[int, int] | None:
        """Two boxes that share elements; None if all are disjoint."""
        if len(self._boxes) > 1:
            for number, box in enumerate(self._boxes):
                for other in self._near(box):
                    if other < number and self._boxes[other].overlap(box) is not None:
                        return other, number
        return None

    def _near(self, wanted: Box) -> list[int]:
        if self._axis is None:
            return self._order
        start = wanted.offsets[self._axis]
        low = bisect_left(self._starts, start - self._longest + 1)
        return self._order[low : bisect_left(self._starts, start + wanted.sizes[self._axis])]


def _minus(inner: Box, outer: Box) -> Shape:
    return tuple(a - b for a, b in zip(inner.offsets, outer.offsets))


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Two boxes that share elements; None if all are disjoint."""
    return StoredBoxes(boxes).first_overlap()
