"""Compute layouts: who updates a matrix that several ranks store parts of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opt_distributed.layout import ComputeLayout, Computes, LayoutError, SplitMatrix, compute_layout
from opt_paramgroups import ParamId


def split(*shapes: tuple[int, ...], dim: int | None = 0) -> list[SplitMatrix]:
    return [SplitMatrix(id=ParamId(0, f"w{index}"), shape=shape, dim=dim) for index, shape in enumerate(shapes)]


def computed(layout: ComputeLayout) -> list[list[str]]:
    return [[slot.matrix.id.name for slot in layout.computed_by(rank)] for rank in range(layout.num_ranks)]


@pytest.mark.parametrize("computes", [Computes.PART, Computes.EVERY, Computes.JOINT])
def test_every_rank_takes_part_in_every_matrix_unless_owners_compute(computes: Computes) -> None:
    layout = compute_layout(split((8, 4), (4, 4)), num_ranks=2, computes=computes)
    assert computed(layout) == [["w0", "w1"], ["w0", "w1"]]


def test_owned_matrices_are_dealt_costliest_first_to_the_least_loaded_rank() -> None:
    layout = compute_layout(split((4, 4), (16, 8), (8, 8), (8, 4)), num_ranks=2, computes=Computes.OWNER)
    assert computed(layout) == [["w1"], ["w0", "w2", "w3"]]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=20), st.integers(1, 5))
def test_every_owned_matrix_has_exactly_one_owner(shapes: list[tuple[int, int]], num_ranks: int) -> None:
    wide = [(m * num_ranks, n) for m, n in shapes]
    layout = compute_layout(split(*wide), num_ranks=num_ranks, computes=Computes.OWNER)
    names = [name for of_rank in computed(layout) for name in of_rank]
    assert sorted(names) == sorted(f"w{index}" for index in range(len(wide)))


def test_an_unsplit_matrix_is_computed_where_it_lies() -> None:
    (slot,) = compute_layout(split((3, 5), dim=None), num_ranks=2, computes=Computes.OWNER).slots
    assert slot.computes is Computes.PART
    assert not slot.gathers


@pytest.mark.parametrize(("dim", "part"), [(0, (2, 6)), (1, (4, 3)), (None, (4, 6))], ids=["rows", "columns", "whole"])
def test_the_parts_of_a_matrix_are_equal(dim: int | None, part: tuple[int, ...]) -> None:
    layout = compute_layout(split((4, 6), dim=dim), num_ranks=2, computes=Computes.EVERY)
    assert layout.part_shape(layout.slots[0]) == part


def test_a_dimension_that_does_not_divide_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"w0.* of shape \(5, 4\) does not divide into 2 equal parts"):
        compute_layout(split((5, 4)), num_ranks=2, computes=Computes.JOINT)


def test_a_split_along_a_dimension_that_is_not_there_is_refused() -> None:
    with pytest.raises(LayoutError, match="split along dim 2"):
        split((4, 4), dim=2)
