"""Boxes of flat ranges and copies between boxes: every element exactly once, in few pieces."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opt_checkpoint import ShardedTensor
from opt_checkpoint.boxes import Box, boxes_of, columns_of, cut_flat_range, overlapping_pairs, split_rows

SHAPES = st.lists(st.integers(1, 6), max_size=5).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, start, stop


def values(box: Box, shape: tuple[int, ...]) -> list[int]:
    """Row-major numbers of the elements of a box, from torch's own indexing."""
    grid = torch.arange(math.prod(shape)).view(shape)
    return grid[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes))].reshape(-1).tolist()


@given(ranges())
@settings(max_examples=300, deadline=None)
def test_a_flat_range_is_few_boxes_in_row_major_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    boxes = list(cut_flat_range(shape, start, stop))
    assert [v for box in boxes for v in values(box, shape)] == list(range(start, stop))
    assert all(box.numel for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("shape", "start", "stop", "expected"),
    [
        ((), 0, 1, [Box((), ())]),
        ((), 0, 0, []),
        ((5,), 2, 4, [Box((2,), (2,))]),
        ((4, 3), 0, 12, [Box((0, 0), (4, 3))]),
        ((4, 3), 2, 11, [Box((0, 2), (1, 1)), Box((1, 0), (2, 3)), Box((3, 0), (1, 2))]),
        ((4, 0), 0, 0, []),
    ],
)
def test_known_cuts(shape: tuple[int, ...], start: int, stop: int, expected: list[Box]) -> None:
    assert list(cut_flat_range(shape, start, stop)) == expected


def test_prepended_axes_and_the_offset_are_those_of_the_global_tensor() -> None:
    shard = ShardedTensor(
        "w", torch.zeros(5), torch.float32, (2, 3), (7, 8, 3), (6, 4, 0), None, prepend_axis_num=1,
        flattened_range=slice(1, 6),
    )  # fmt: skip
    assert [(b.box, b.start, b.stop) for b in boxes_of(shard)] == [
        (Box((6, 4, 1), (1, 1, 2)), 0, 2),
        (Box((6, 5, 0), (1, 1, 3)), 2, 5),
    ]


def test_an_empty_shard_has_no_box() -> None:
    assert list(boxes_of(ShardedTensor.from_rank_offsets("w", torch.zeros(0, 3)))) == []


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    """Two tilings of one tensor by flat ranges."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
    numel = math.prod(shape)
    tiles = []
    for _ in range(2):
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=6))})
        tiles.append([box for a, b in pairwise(cuts) for box in cut_flat_range(shape, a, b)])
    return shape, tiles[0], tiles[1]


def first_overlap(boxes: list[Box]) -> tuple[int, int] | None:
    axes = max(1, len(boxes[0].sizes))
    pairs = overlapping_pairs(np.zeros(len(boxes), np.int64), *columns_of(boxes, axes))
    return next(((int(left[0]), int(right[0])) for left, right in pairs), None)


@given(tilings())
@settings(max_examples=100, deadline=None)
def test_a_tiling_has_no_overlap_and_a_repeated_box_has(case: tuple[tuple[int, ...], list[Box], list[Box]]) -> None:
    _, stored, wanted = case
    assert first_overlap(stored) is None
    pair = first_overlap([*stored, wanted[0]])
    assert pair is not None
    a, b = ([*stored, wanted[0]][i] for i in pair)
    assert a.overlap(b) is not None
    assert [first_overlap([Box((), ())] * count) for count in (1, 2)] == [None, (0, 1)]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 100])
def test_rows_are_split_without_loss(parts: int) -> None:
    box = Box((0, 2, 1), (1, 7, 3))
    pieces = list(split_rows(box, parts))
    assert first_overlap(pieces) is None
    assert sum(p.numel for p in pieces) == box.numel
    assert len(pieces) == min(parts, 7)
    assert all(box.overlap(p) == p for p in pieces)
