"""A local tier that does not fit the world that resumes: another layout, another number of ranks, half of a step."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import run_ranks
from local_tiers import tiers

from opt_checkpoint import (
    CheckpointMismatchError,
    CheckpointValueError,
    ShardedObject,
    ShardedTensor,
    TieredCheckpointManager,
    sharded_like,
)
from opt_checkpoint.run.series import step_name


def half(step: int, rank: int) -> ShardedTensor:
    """Half of the rows of `w`."""
    return ShardedTensor.from_rank_offsets("w", torch.full((2, 3), 10.0 * step + rank), (0, rank, 2))


def own(step: int, rank: int) -> ShardedTensor:
    """A tensor that one rank holds whole, as the state of a parameter that belongs to it."""
    return sharded_like(f"own.{rank}", torch.full((3,), 10.0 * step + rank))


def save_halves(rank: int, size: int, folder: str, steps: list[int], durable_every: int) -> None:
    with tiers(folder, rank, durable_every=durable_every) as manager:
        for step in steps:
            halves = {"half": half(step, rank)} if size == 2 else {}
            manager.save(step, {**halves, "own": own(step, rank), "step": step})


def wanted(rank: int) -> dict[str, Any]:
    """What the rank asks for that now has the other one's place."""
    return {"half": half(0, 1 - rank), "own": own(0, 1 - rank), "step": None}


def assert_is_of_step(loaded: dict[str, Any], step: int, rank: int) -> None:
    assert loaded["step"] == step
    assert torch.equal(loaded["half"], half(step, 1 - rank).data)
    assert torch.equal(loaded["own"], own(step, 1 - rank).data)


def resume_in_another_layout(rank: int, size: int, folder: str) -> None:
    with tiers(folder, rank) as manager:
        assert_is_of_step(manager.load(wanted(rank)).state, 2, rank)
        found = manager.find()
        assert (found.step, found.tier) == (2, "durable")
        assert "step 3 of the local tier: " in found.skipped_reasons[-1]
    with tiers(folder, rank) as manager:
        assert manager.latest() == 3
        state = wanted(rank)
        with pytest.raises(CheckpointMismatchError, match=r"another layout(.|\n)*call find\(state\)"):
            manager.load(state)
        assert_is_of_step(state | {"step": 0, "half": state["half"].data, "own": state["own"].data}, 0, rank)
        assert manager.latest(state) == 2
        assert_is_of_step(manager.load(state).state, 2, rank)


def test_another_layout_goes_on_to_the_durable_tier(tmp_path: Path) -> None:
    """The same number of ranks, each in the other's place: what one saved, the other asks for."""
    run_ranks(2, save_halves, str(tmp_path), [1, 2, 3], 2)
    run_ranks(2, resume_in_another_layout, str(tmp_path))


def ask_for_what_another_rank_holds(rank: int, size: int, folder: str) -> None:
    whole = torch.full((4, 3), -1.0)
    with tiers(folder, rank) as manager:
        assert manager.latest() == 1
        with pytest.raises(CheckpointMismatchError, match="w: the checkpoint holds 6 of 12 elements"):
            manager.load({"half": sharded_like("w", whole)})
        assert (whole == -1).all()  # refused before memory is written
        with pytest.raises(CheckpointMismatchError, match=r"rank 0 asks for own\.1, which is in the part of rank 1"):
            manager.load({"own": own(0, 1 - rank)}, strict="return_missing")
        report = manager.load({"own": own(0, rank), "new": own(0, 7)}, strict="return_missing")
        assert report.missing == ("own.7",)
        with pytest.raises(CheckpointMismatchError, match="another part of this step has been loaded already"):
            manager.find(wanted(rank))
    with tiers(folder, rank) as manager, pytest.raises(CheckpointMismatchError, match="holds no checkpoint to load"):
        manager.load(wanted(rank))


def test_a_key_or_half_tensor_in_another_ranks_part_is_found(tmp_path: Path) -> None:
    """With strict="return_missing" it was left out without an error, and the run went on with what was in memory."""
    run_ranks(2, save_halves, str(tmp_path), [1], 100)
    run_ranks(2, ask_for_what_another_rank_holds, str(tmp_path))


def find_for_another_world(rank: int, size: int, folder: str) -> None:
    with (
        tiers(folder, rank) as manager,
        pytest.raises(CheckpointMismatchError, match=r"by 3 ranks, and this world has 2; .* holds no checkpoint"),
    ):
        manager.find()


def test_other_ranks_without_a_durable_step_do_not_start_over(tmp_path: Path) -> None:
    """`find` returned None, and the run began from the beginning."""
    run_ranks(3, save_halves, str(tmp_path), [1], 100)
    run_ranks(2, find_for_another_world, str(tmp_path))


def test_a_step_that_was_never_whole_is_skipped_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_ranks(2, save_halves, str(tmp_path), [1], 100)
    for part in tmp_path.glob(f"node-*/*/{step_name(1)}/rank-00001"):
        shutil.rmtree(part)
    with pytest.warns(UserWarning, match="one node"), caplog.at_level(logging.WARNING, logger="opt_checkpoint"):
        assert tiers(str(tmp_path), 0).find() is None
    assert "nothing to resume from: step 1 of the local tier: it was saved by 2 ranks" in caplog.text


def alone(folder: Path, **options: Any) -> TieredCheckpointManager:
    with pytest.warns(UserWarning, match="one node"):
        return tiers(str(folder), 0, **options)


def test_parts_hold_tensors_in_lists_but_refuse_mixed_lists(tmp_path: Path) -> None:
    """Their place in the list was loaded as None."""
    weights = sharded_like("w", torch.arange(3.0))
    state = {"lst": [1, torch.ones(2)], "opt": {"groups": [{"lr": torch.tensor(0.5)}]}, "w": weights}
    with alone(tmp_path) as manager:
        manager.save(1, state)
        manager.save(2, [weights, 3])
        with pytest.raises(CheckpointValueError, match="a list with plain values; the local tier saves dicts"):
            manager.wait()
        manager.save(2, {"x": ShardedObject("common_state", 5, (1,), (0,))})
        with pytest.raises(CheckpointValueError, match="as the plain values are"):
            manager.wait()
        assert manager.latest() == 1
        loaded = manager.load({"lst": None, "opt": None, "w": None}).state
    assert str(loaded) == str(state | {"w": weights.data})
