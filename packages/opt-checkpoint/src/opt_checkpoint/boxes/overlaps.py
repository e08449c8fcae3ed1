"""Boxes of many tensors at once, as rows of integers: which ones are equal, and which ones share elements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Pairs(NamedTuple):
    """Numbers of boxes: `first[i]` and `second[i]` share elements."""

    first: Array
    second: Array


def overlapping_pairs(tensor: Array, offsets: Array, sizes: Array) -> Iterator[Pairs]:
    """All pairs of boxes of one tensor that share elements; none where every tensor's boxes are disjoint.

    Sweeps along the axis on which the boxes of a tensor crowd least, comparing each box with the next one, the next
    but one, and so on, until none of them begins before the other ends.

    Args:
        tensor: (n,) the number of the tensor of each box.
        offsets: (n, axes) where the boxes begin; axes that a tensor lacks have offset 0.
        sizes: (n, axes) their sizes, at least 1.
    """
    if not len(tensor):
        return
    axis = _least_crowded_axis(tensor, offsets, sizes)[tensor]
    rows = np.arange(len(tensor))
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
            yield Pairs(order[left[shared]], order[right[shared]])
        distance += 1


def _least_crowded_axis(tensor: Array, offsets: Array, sizes: Array) -> Array:
    """For each tensor the axis on which the fewest boxes are side by side on average: length over extent."""
    extent = np.zeros((int(tensor.max()) + 1, offsets.shape[1]))
    np.maximum.at(extent, tensor, offsets + sizes)
    crowd = np.stack([np.bincount(tensor, weights=sizes[:, d]) for d in range(offsets.shape[1])], axis=1)
    axis: Array = np.argmin(crowd / np.maximum(extent, 1), axis=1)
    return axis


class EqualRows(NamedTuple):
    """Rows sorted so that equal ones are neighbours.

    Args:
        order: the rows in that order; equal ones in their own.
        group: the number of the group of equal rows of each row of `order`.
    """

    order: Array
    group: Array


def equal_rows(columns: Sequence[Array]) -> EqualRows:
    """Group equal rows of integer columns."""
    mixed = _mixed(columns)
    order = np.argsort(mixed, kind="stable")
    new = _differs(columns, order)
    if int(new.sum()) != int(
        _differs([mixed], order).sum()
    ):  # other rows of the same hash may stand between equal ones
        order = np.lexsort(tuple(columns))
        new = _differs(columns, order)
    return EqualRows(order, np.cumsum(new) - 1)


def _mixed(columns: Sequence[Array]) -> Array:
    mixed = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        mixed = (mixed ^ column.astype(np.uint64)) * _MIX
        mixed ^= mixed >> np.uint64(29)
    return mixed


def _differs(columns: Sequence[Array], order: Array) -> Array:
    """For each row in an order, whether it differs from the one before."""
    new = np.zeros(len(order), bool)
    new[:1] = True
    for column in columns:
        values = column[order]
        new[1:] |= values[1:] != values[:-1]
    return new
