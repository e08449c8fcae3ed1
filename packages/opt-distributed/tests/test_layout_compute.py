"""Compute layouts: which rank updates a sharded matrix, and which rank stores which part."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opt_distributed.layout import ComputeLayout, Computes, LayoutError, SplitMatrix, compute_layout
from opt_paramgroups import ParamId


def split(*shapes: tuple[int, ...], dims: tuple[int, ...] = (0,)) -> list[SplitMatrix]:
    return [SplitMatrix(id=ParamId(0, f"w{index}"), shape=shape, dims=dims) for index, shape in enumerate(shapes)]


def computed(layout: ComputeLayout) -> list[list[str]]:
    ranks = product(*map(range, layout.sizes))
    return [[slot.matrix.id.name for slot in layout.computed_at(at)] for at in ranks]


@pytest.mark.parametrize("computes", [Computes.PART, Computes.EVERY, Computes.JOINT])
def test_every_rank_takes_part_in_every_matrix_unless_owners_compute(computes: Computes) -> None:
    layout = compute_layout(split((8, 4), (4, 4)), sizes=(2,), computes=computes)
    assert computed(layout) == [["w0", "w1"], ["w0", "w1"]]


def test_owned_matrices_are_assigned_costliest_first_to_the_least_loaded_rank() -> None:
    layout = compute_layout(split((4, 4), (16, 8), (8, 8), (8, 4)), sizes=(2,), computes=Computes.OWNER)
    assert computed(layout) == [["w1"], ["w0", "w2", "w3"]]


sizes_ = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=20), sizes_)
def test_every_owned_matrix_has_exactly_one_owner(shapes: list[tuple[int, int]], sizes: tuple[int, ...]) -> None:
    layout = compute_layout(split(*shapes, dims=(0,) * len(sizes)), sizes=sizes, computes=Computes.OWNER)
    names = [name for of_rank in computed(layout) for name in of_rank]
    assert sorted(names) == sorted(f"w{index}" for index in range(len(shapes)))


def test_a_block_of_a_kept_axis_has_an_owner_among_the_ranks_that_share_it() -> None:
    layout = compute_layout(split((8, 8), (8, 8), dims=(1, 0)), sizes=(2, 2), computes=Computes.OWNER, kept=1)
    assert computed(layout) == [["w0"], ["w1"], ["w0"], ["w1"]]
    assert layout.num_ranks == 2
    assert layout.whole(layout.slots[0], (1, 0)) == ((0, 4), (8, 4))


@given(st.integers(0, 9), st.integers(0, 9), sizes_, st.data())
def test_parts_are_what_torch_chunk_makes_and_cover_the_matrix_once(
    rows: int, cols: int, sizes: tuple[int, ...], data: st.DataObject
) -> None:
    dims = tuple(data.draw(st.integers(0, 1)) for _ in sizes)
    layout = compute_layout(split((rows, cols), dims=dims), sizes=sizes, computes=Computes.OWNER)
    whole = torch.arange(rows * cols).view(rows, cols)
    seen = []
    for at in product(*map(range, sizes)):
        part = whole
        for dim, ranks, index in zip(dims, sizes, at, strict=True):
            chunks = part.chunk(ranks, dim)
            part = chunks[index] if index < len(chunks) else part.narrow(dim, part.shape[dim], 0)
        (top, left), shape = layout.block(layout.slots[0], at)
        assert torch.equal(whole[top : top + shape[0], left : left + shape[1]], part)
        seen += part.flatten().tolist()
    assert sorted(seen) == list(range(rows * cols))


def test_parts_of_a_joint_update_must_be_equal() -> None:
    assert compute_layout(split((5, 4)), sizes=(2,), computes=Computes.OWNER).slots
    with pytest.raises(LayoutError, match=r"w0.* of shape \(5, 4\) does not divide into \(2,\) equal parts .*; pad it"):
        compute_layout(split((5, 4)), sizes=(2,), computes=Computes.JOINT)


def test_a_split_along_a_dimension_that_is_not_there_is_refused() -> None:
    with pytest.raises(LayoutError, match="split along dim 2"):
        split((4, 4), dims=(2,))


def test_a_matrix_cut_by_another_number_of_axes_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"w0.* is cut along dims \(0,\) by 2 axes"):
        compute_layout(split((4, 4)), sizes=(2, 2), computes=Computes.OWNER)
