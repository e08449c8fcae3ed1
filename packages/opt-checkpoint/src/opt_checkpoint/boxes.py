"""Boxes: axis-aligned blocks of a global tensor; those that make up a flat range, and what two sets of them share.

Integers only. A flat range of a row-major block is a run of elements. In an n-d block it equals at most `2n-1` boxes,
each a contiguous slice of the run. The shard of a bucket is therefore stored by parameter without a copy, a gather or a
message. Boxes of many tensors are rows of integers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from opt_checkpoint.state.sharded import Shape, ShardedTensor, flat_bounds

Array: TypeAlias = npt.NDArray[Any]
_MIX = np.uint64(0x9E3779B97F4A7C15)


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

    def within(self, outer: Box) -> Shape:
        """The offsets relative to those of a box that contains this one."""
        return tuple(o - b for o, b in zip(self.offsets, outer.offsets))

    def overlap(self, other: Box) -> Box | None:
        """The elements that both boxes have; None if there are none."""
        start = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets))
        sizes = tuple(
            min(a + m, b + n) - s for a, m, b, n, s in zip(self.offsets, self.sizes, other.offsets, other.sizes, start)
        )
        return None if any(n <= 0 for n in sizes) else Box(start, sizes)

    def part_of(self, values: Tensor, part: Box) -> Tensor:
        """The values of a box within this one, as a view of the values of this one."""
        for axis, (start, size) in enumerate(zip(part.within(self), part.sizes)):
            values = values.narrow(axis, start, size)
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
        if numel := math.prod(box.sizes):
            yield FlatBox(box, 0, numel)
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

    def overlaps(self, wanted: Box) -> Iterator[tuple[int, Box]]:
        """Index and shared elements of each stored box that overlaps `wanted`, in sorted order."""
        for number in self._near(wanted):
            if (shared := self._boxes[number].overlap(wanted)) is not None:
                yield number, shared

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


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Two boxes that share elements; None if all are disjoint."""
    return StoredBoxes(boxes).first_overlap()


def overlapping_pairs(tensor: Array, offsets: Array, sizes: Array) -> Iterator[tuple[Array, Array]]:
    """All pairs of boxes of one tensor that share elements, as two arrays of indices; none if the boxes of every
    tensor are disjoint.

    Sorts along the axis with the fewest boxes side by side (total length divided by extent), and compares each box with
    those after it until they begin after its end.

    Args:
        tensor: (n,) the index of the tensor of each box.
        offsets: (n, axes) where the boxes begin; axes that a tensor lacks have offset 0.
        sizes: (n, axes) their sizes, at least 1.
    """
    if not len(tensor):
        return
    extent = np.zeros((int(tensor.max()) + 1, offsets.shape[1]))
    np.maximum.at(extent, tensor, offsets + sizes)
    length = np.stack([np.bincount(tensor, weights=sizes[:, d]) for d in range(offsets.shape[1])], axis=1)
    axis, rows = np.argmin(length / np.maximum(extent, 1), axis=1)[tensor], np.arange(len(tensor))
    start = offsets[rows, axis]
    order = np.lexsort((start, tensor))
    tensor, start, stop = tensor[order], start[order], (start + sizes[rows, axis])[order]
    low, high = offsets[order], (offsets + sizes)[order]
    left, distance = rows, 1
    while len(left):
        left = left[left + distance < len(rows)]
        right = left + distance
        near = (tensor[right] == tensor[left]) & (start[right] < stop[left])
        left, right = left[near], right[near]
        shared = ((low[right] < high[left]) & (low[left] < high[right])).all(axis=1)
        if shared.any():
            yield order[left[shared]], order[right[shared]]
        distance += 1


def equal_rows(columns: Sequence[Array]) -> tuple[Array, Array]:
    """Sort rows of integer columns so that equal ones are neighbours, in their order.

    Returns:
        The indices of the rows in sorted order; for each, the index of its group of equal rows.
    """
    mixed = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        mixed = (mixed ^ column.astype(np.uint64)) * _MIX
        mixed ^= mixed >> np.uint64(29)
    order = np.argsort(mixed, kind="stable")
    new = _is_new(columns, order)
    if new.sum() != _is_new([mixed], order).sum():  # rows of the same hash with other values may lie between equal rows
        order = np.lexsort(tuple(columns))
        new = _is_new(columns, order)
    return order, np.cumsum(new) - 1


def _is_new(columns: Sequence[Array], order: Array) -> Array:
    """For each row in an order, whether it differs from the one before."""
    new = np.zeros(len(order), bool)
    new[:1] = True
    for column in columns:
        values = column[order]
        new[1:] |= values[1:] != values[:-1]
    return new
