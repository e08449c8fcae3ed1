"""Finds equal and overlapping boxes among those of many tensors, which are given as rows of integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Pairs(NamedTuple):
    """Pairs of box indices: boxes `first[i]` and `second[i]` share elements."""

    first: Array
    second: Array


def overlapping_pairs(tensor: Array, offsets: Array, sizes: Array) -> Iterator[Pairs]:
    """All pairs of boxes of one tensor that share elements; none if the boxes of every tensor are disjoint.

    Sorts along the axis with the fewest boxes side by side, and compares each box with those after it until they begin
    after its end.

    Args:
        tensor: (n,) the index of the tensor of each box.
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
    """For each tensor, the axis with the fewest boxes side by side on average: total length divided by extent."""
    extent = np.zeros((int(tensor.max()) + 1, offsets.shape[1]))
    np.maximum.at(extent, tensor, offsets + sizes)
    crowd = np.stack([np.bincount(tensor, weights=sizes[:, d]) for d in range(offsets.shape[1])], axis=1)
    axis: Array = np.argmin(crowd / np.maximum(extent, 1), axis=1)
    return axis


class EqualRows(NamedTuple):
    """Rows sorted so that equal ones are neighbours.

    Args:
        order: indices of the rows in sorted order; equal rows keep their order.
        group: for each entry of `order`, the index of its group of equal rows.
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
    ):  # rows with the same hash but other values may lie between equal rows
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
