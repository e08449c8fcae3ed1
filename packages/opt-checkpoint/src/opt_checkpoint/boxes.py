"""Boxes: axis-aligned blocks of a global tensor; those that make up a flat range, and what two sets of them share.

Integers only. A flat range of a row-major block is a run of elements. In an n-d block it equals at most `2n-1` boxes,
each a contiguous slice of the run. The shard of a bucket is therefore stored by parameter without a copy, a gather or a
message. Boxes of many tensors are rows of integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import add, mul, sub
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.sharded import Shape, ShardedTensor, flat_bounds, with_axis

Array: TypeAlias = npt.NDArray[Any]


class Box(NamedTuple):
    """The block of `sizes` that starts at `offsets`."""

    offsets: Shape
    sizes: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def stops(self) -> Shape:
        """One past its last element, along every axis."""
        return tuple(map(add, self.offsets, self.sizes))

    @property
    def text(self) -> str:
        """The box as people write it: `[0:4, 8:16]`."""
        spans = (f"{start}:{stop}" for start, stop in zip(self.offsets, self.stops))
        return f"[{', '.join(spans)}]"

    def moved(self, by: Shape) -> Box:
        """Return the same box with `by` added to its offsets."""
        return Box(tuple(map(add, self.offsets, by)), self.sizes)

    def within(self, outer: Box) -> Shape:
        """Return the offsets relative to those of a box that contains this one."""
        return tuple(map(sub, self.offsets, outer.offsets))

    def overlap(self, other: Box) -> Box | None:
        """Return the elements that both boxes have; None if there are none."""
        start = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(map(sub, map(min, self.stops, other.stops), start))
        return None if any(n <= 0 for n in sizes) else Box(start, sizes)

    def part_of(self, values: Tensor, part: Box) -> Tensor:
        """Return the values of a box within this one, as a view of the values of this one."""
        for axis, (start, size) in enumerate(zip(part.within(self), part.sizes)):
            values = values.narrow(axis, start, size)
        return values


class FlatBox(NamedTuple):
    """A box, and the element of the flattened local data from which on its elements are a run."""

    box: Box
    start: int


def row_major_strides(shape: Shape) -> Shape:
    """Return elements from one index to the next along every axis of a contiguous tensor of `shape`."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def position_of(index: Iterable[int], strides: Shape) -> int:
    """Return the position of an element, given by its index along every axis."""
    return sum(map(mul, index, strides))


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
    strides = row_major_strides(shape)
    if not shape and start < stop:
        yield Box((), ())
        return
    while start < stop:
        left = stop - start
        axis = next(d for d, s in enumerate(strides) if start % s == 0 and s <= left)
        index = tuple(start // s % n for s, n in zip(strides, shape))
        rows = min(left // strides[axis], shape[axis] - index[axis])
        offsets = index[: axis + 1] + (0,) * (len(shape) - axis - 1)
        yield Box(offsets, (1,) * axis + (rows,) + shape[axis + 1 :])
        start += rows * strides[axis]


def boxes_of(shard: ShardedTensor) -> Iterator[FlatBox]:
    """Yield the boxes of the global tensor that a shard holds, each with the run of its flattened data.

    Empty shards have no box: chunks of one tensor must have distinct offsets on disk, and an empty one would share its.
    """
    if shard.flattened_range is None:
        box = Box(shard.global_offset, shard.global_block_shape)
        if box.numel:
            yield FlatBox(box, 0)
        return
    prepended = (1,) * shard.prepend_axis_num
    position = 0
    for local in cut_flat_range(shard.local_shape, *flat_bounds(shard.flattened_range)):
        whole = Box((0,) * shard.prepend_axis_num + local.offsets, prepended + local.sizes)
        yield FlatBox(whole.moved(shard.global_offset), position)
        position += whole.numel


def view_of(shard: ShardedTensor, flat_box: FlatBox, part: Box) -> Tensor:
    """Return the values of `part`, a box within a box of the shard, as a view of the shard's data.

    Args:
        shard: the shard, with data.
        flat_box: one of `boxes_of(shard)`.
        part: a box inside `flat_box.box`, in global coordinates.
    """
    if shard.data is None:
        raise CheckpointValueError(f"{shard.key} has no data")
    values = shard.data.detach()
    if shard.flattened_range is not None:
        if not values.is_contiguous():
            raise CheckpointValueError(f"{shard.key} holds a flat range in memory that is not contiguous")
        values = values.narrow(0, flat_box.start, flat_box.box.numel).view(flat_box.box.sizes)
    elif shard.prepend_axis_num:
        values = values[(None,) * shard.prepend_axis_num]
    return values if part == flat_box.box else flat_box.box.part_of(values, part)


def split_rows(box: Box, parts: int) -> Iterator[Box]:
    """Cut a box into about `parts` pieces along its first axis longer than 1. Each is one run of the box's elements."""
    axis = next((d for d, n in enumerate(box.sizes) if n > 1), None)
    if axis is None:
        yield box
        return
    rows = box.sizes[axis]
    edges = sorted({rows * k // parts for k in range(parts + 1)})
    for low, high in pairwise(edges):
        offsets = with_axis(box.offsets, axis, box.offsets[axis] + low)
        yield Box(offsets, with_axis(box.sizes, axis, high - low))


def columns_of(boxes: Sequence[Box], axes: int) -> tuple[Array, Array]:
    """Return offsets and sizes of boxes, (n, axes) each; axes that a box lacks have offset 0 and size 1."""
    shape = len(boxes), axes
    offsets = [box.offsets + (0,) * (axes - len(box.offsets)) for box in boxes]
    sizes = [box.sizes + (1,) * (axes - len(box.sizes)) for box in boxes]
    return np.array(offsets, np.int64).reshape(shape), np.array(sizes, np.int64).reshape(shape)


def overlapping_pairs(tensor: Array, offsets: Array, sizes: Array) -> Iterator[tuple[Array, Array]]:
    """Yield all pairs of boxes of one tensor that share elements, as two arrays of indices; none if the boxes of every
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
    stops = offsets + sizes  # (n, axes)
    extent = np.zeros((int(tensor.max()) + 1, offsets.shape[1]))  # (tensors, axes) where the last box ends
    np.maximum.at(extent, tensor, stops)
    length = np.stack([np.bincount(tensor, weights=column) for column in sizes.T], axis=1)  # (tensors, axes)
    axis = np.argmin(length / np.maximum(extent, 1), axis=1)[tensor]  # (n,) along which each box is sorted
    rows = np.arange(len(tensor))
    order = np.lexsort((offsets[rows, axis], tensor))  # (n,); all that follows is in this order
    tensor = tensor[order]
    low = offsets[order]
    high = stops[order]
    start = low[rows, axis[order]]
    stop = high[rows, axis[order]]
    left = rows
    distance = 1
    while len(left):
        left = left[left + distance < len(rows)]
        right = left + distance
        near = (tensor[right] == tensor[left]) & (start[right] < stop[left])
        left = left[near]
        right = right[near]
        shared = ((low[right] < high[left]) & (low[left] < high[right])).all(axis=1)
        if shared.any():
            yield order[left[shared]], order[right[shared]]
        distance += 1
