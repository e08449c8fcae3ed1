"""Boxes of flat ranges and copies between boxes: every element exactly once, in few pieces."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opt_checkpoint import ShardedTensor
from opt_checkpoint.boxes import Box, boxes_of, columns_of, cut_flat_range, overlapping_pairs
from opt_checkpoint.dcp.writing import reorder_runs
from opt_checkpoint.state.tensors import Cut, one_run

SHAPES = st.lists(st.integers(1, 6), max_size=5).map(tuple)


def values(box: Box, shape: tuple[int, ...]) -> list[int]:
    """Row-major numbers of the elements of a box, from torch's own indexing."""
    grid = torch.arange(math.prod(shape)).view(shape)
    return grid[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes))].reshape(-1).tolist()


@given(SHAPES, st.data())
@settings(max_examples=300, deadline=None)
def test_a_flat_range_is_few_boxes_in_row_major_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    boxes = list(cut_flat_range(shape, start, stop))
    assert [v for box in boxes for v in values(box, shape)] == list(range(start, stop))
    assert all(box.numel for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_known_cuts_and_their_places_in_the_global_tensor() -> None:
    assert list(cut_flat_range((4, 0), 0, 0)) == []
    assert list(cut_flat_range((4, 3), 0, 12)) == [Box((0, 0), (4, 3))]  # as few as possible
    runs = [Box((0, 2), (1, 1)), Box((1, 0), (2, 3)), Box((3, 0), (1, 2))]
    assert list(cut_flat_range((4, 3), 2, 11)) == runs
    assert list(boxes_of(ShardedTensor.from_rank_offsets("w", torch.zeros(0, 3)))) == []
    shape = (2, 3)
    whole = (7, 8, 3)
    offset = (6, 4, 0)
    shard = ShardedTensor("w", torch.zeros(5), torch.float32, shape, whole, offset, None, 0, 1, False, slice(1, 6))
    assert list(boxes_of(shard)) == [(Box((6, 4, 1), (1, 1, 2)), 0), (Box((6, 5, 0), (1, 1, 3)), 2)]


def first_overlap(boxes: list[Box]) -> tuple[int, int] | None:
    axes = max(1, len(boxes[0].sizes))
    pairs = overlapping_pairs(np.zeros(len(boxes), np.int64), *columns_of(boxes, axes))
    return next(((int(left[0]), int(right[0])) for left, right in pairs), None)


@given(SHAPES, st.data())
@settings(max_examples=100, deadline=None)
def test_a_tiling_has_no_overlap_and_a_repeated_box_has(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    stored, (wanted, *_) = (
        [box for a, b in pairwise(sorted({0, numel, *cuts})) for box in cut_flat_range(shape, a, b)]
        for cuts in data.draw(st.tuples(*[st.lists(st.integers(0, numel), max_size=6)] * 2))
    )
    assert first_overlap(stored) is None
    a, b = ([*stored, wanted][i] for i in first_overlap([*stored, wanted]) or ())
    assert a.overlap(b) is not None


def cuts(dp: int, tp: int, num_dp: int, num_tp: int) -> list[Cut]:
    """As FSDP2 places a parameter that tensor parallelism has cut: its own axis of the mesh stands first."""
    return [Cut(dp, num_dp, split_factor=num_tp), Cut(tp, num_tp)]


@pytest.mark.parametrize("num_dp", [1, 2, 3])
@pytest.mark.parametrize("num_tp", [1, 2, 3])
def test_even_parts_tile_the_axis_tensor_parallel_ranks_first(num_dp: int, num_tp: int) -> None:
    length = 2 * num_dp * num_tp
    runs = [one_run(length, *cuts(dp, tp, num_dp, num_tp)) for tp in range(num_tp) for dp in range(num_dp)]
    assert [list(run or []) for run in runs] == [[2 * n, 2 * n + 1] for n in range(num_dp * num_tp)]


def test_uneven_parts_are_accepted_only_if_both_readings_agree() -> None:
    """Nine rows over four and two: as placed, the last row is tensor-parallel rank 0's; as FSDP2 made it, rank 1's."""
    runs = {(dp, tp): one_run(6, *cuts(dp, tp, 2, 2)) for dp in range(2) for tp in range(2)}
    assert runs == {(0, 0): range(2), (1, 0): range(2, 3), (0, 1): range(3, 5), (1, 1): range(5, 6)}
    assert [one_run(9, *cuts(dp, tp, 4, 2)) for dp, tp in ((3, 0), (3, 1), (0, 0))] == [None] * 3  # on every rank
    assert one_run(8, Cut(0, 2, split_factor=2)) is None  # a part of each of several runs
    assert (one_run(5), one_run(2, Cut(2, 3))) == (range(5), range(0))


@given(st.lists(st.integers(0, 4), max_size=9).flatmap(lambda n: st.tuples(st.just(n), st.permutations(range(len(n))))))
@settings(max_examples=300)
def test_reordered_runs_keep_their_values(drawn: tuple[list[int], list[int]]) -> None:
    lengths, order = drawn
    values = np.arange(sum(lengths), dtype="<u4")
    runs = np.split(values, np.cumsum(lengths)[:-1]) if lengths else []
    expected = [value for part in order for value in runs[part].tolist()]
    columns = np.array(lengths, np.int64), np.array(order, np.int64)
    assert reorder_runs(values, *columns).tolist() == expected
