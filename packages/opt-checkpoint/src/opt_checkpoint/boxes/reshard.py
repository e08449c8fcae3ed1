"""Computes which parts of stored boxes make up the wanted boxes, in integers only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from opt_checkpoint.boxes.box import Box
from opt_checkpoint.state.sharded import Shape


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
        boxes: disjoint boxes of one tensor.
    """

    __slots__ = ("_axis", "_boxes", "_longest", "_order", "_starts")

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._axis = busiest_axis(boxes)
        if self._axis is None:
            self._order, self._starts, self._longest = list(range(len(boxes))), [0] * len(boxes), 1
            return
        axis = self._axis
        self._order = sorted(range(len(boxes)), key=lambda i: boxes[i].offsets[axis])
        self._starts = [boxes[i].offsets[axis] for i in self._order]
        self._longest = max(b.sizes[axis] for b in boxes)

    def copies_to(self, wanted: Box) -> Iterator[Copy]:
        """The overlap of `wanted` with each stored box that it overlaps, in sorted order."""
        for number in self._near(wanted):
            stored = self._boxes[number]
            shared = stored.overlap(wanted)
            if shared is not None:
                yield Copy(number, _minus(shared, stored), _minus(shared, wanted), shared.sizes)

    def _near(self, wanted: Box) -> list[int]:
        if self._axis is None:
            return self._order
        start = wanted.offsets[self._axis]
        low = bisect_left(self._starts, start - self._longest + 1)
        return self._order[low : bisect_left(self._starts, start + wanted.sizes[self._axis])]


def _minus(inner: Box, outer: Box) -> Shape:
    return tuple(a - b for a, b in zip(inner.offsets, outer.offsets))


def busiest_axis(boxes: Sequence[Box]) -> int | None:
    """The axis with the most distinct offsets, along which sorting separates boxes best; None without axes."""
    if not boxes or not boxes[0].sizes:
        return None
    places = [len({b.offsets[d] for b in boxes}) for d in range(len(boxes[0].sizes))]
    return places.index(max(places))


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Two boxes that share elements; None if all are disjoint. Sorts along the busiest axis."""
    axis = busiest_axis(boxes)
    if axis is None:
        return (0, 1) if len(boxes) > 1 else None
    open_boxes: list[int] = []
    for number in sorted(range(len(boxes)), key=lambda i: boxes[i].offsets[axis]):
        start = boxes[number].offsets[axis]
        open_boxes = [i for i in open_boxes if boxes[i].offsets[axis] + boxes[i].sizes[axis] > start]
        for other in open_boxes:
            if boxes[other].overlap(boxes[number]) is not None:
                return other, number
        open_boxes.append(number)
    return None
