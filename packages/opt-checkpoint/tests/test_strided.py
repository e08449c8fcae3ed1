"""Which rows of an axis are here, where tensor parallelism cuts it first and FSDP2 what that left."""

from __future__ import annotations

import pytest

from opt_checkpoint.state.tensors import Cut, one_run


def cuts(dp: int, tp: int, num_dp: int, num_tp: int) -> list[Cut]:
    """As FSDP2 places a parameter that tensor parallelism has cut: its own axis of the mesh stands first."""
    return [Cut(dp, num_dp, split_factor=num_tp), Cut(tp, num_tp)]


@pytest.mark.parametrize("num_dp", [1, 2, 3])
@pytest.mark.parametrize("num_tp", [1, 2, 3])
def test_even_parts_are_runs_that_tile_the_axis_tensor_parallel_ranks_first(num_dp: int, num_tp: int) -> None:
    length = 2 * num_dp * num_tp
    runs = [one_run(length, cuts(dp, tp, num_dp, num_tp)) for tp in range(num_tp) for dp in range(num_dp)]
    assert [list(run or []) for run in runs] == [[2 * n, 2 * n + 1] for n in range(num_dp * num_tp)]


def test_uneven_parts_are_accepted_only_if_both_readings_agree() -> None:
    """Nine rows over four and two: as placed, the last row is tensor-parallel rank 0's; as FSDP2 made it, rank 1's."""
    runs = {(dp, tp): one_run(6, cuts(dp, tp, 2, 2)) for dp in range(2) for tp in range(2)}
    assert runs == {(0, 0): range(2), (1, 0): range(2, 3), (0, 1): range(3, 5), (1, 1): range(5, 6)}
    assert [one_run(9, cuts(dp, tp, 4, 2)) for dp, tp in ((3, 0), (3, 1), (0, 0))] == [None, None, range(2)]
    assert one_run(8, [Cut(0, 2, split_factor=2)]) is None  # a part of each of several runs
    assert (one_run(5, []), one_run(2, [Cut(2, 3)])) == (range(5), range(0))
