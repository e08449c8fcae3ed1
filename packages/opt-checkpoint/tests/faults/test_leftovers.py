"""F9, F18: what lies around beside checkpoints, and ranks that do not see the same directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from checkpoint_ranks import RankPool
from states import assert_is_step, state_at

from opt_checkpoint import (
    CheckpointExistsError,
    CheckpointManager,
    CheckpointNotFoundError,
    committed_steps,
    save,
)
from opt_checkpoint.run import manager as manager_module
from opt_checkpoint.run.manager import step_name

TOKEN = "0123456789abcdef" * 2


def litter(folder: Path) -> set[str]:
    """Make everything that may lie around; the names that must stay."""
    for name in (f"{step_name(9)}.tmp-{TOKEN}", f"{step_name(1)}.deleting-{TOKEN}"):
        (folder / name).mkdir()
        (folder / name / "__0_0.distcp").write_bytes(b"half")
    (folder / step_name(50)).mkdir()
    (folder / step_name(60)).mkdir()
    (folder / step_name(60) / "manifest.json").write_bytes(b"{}")
    (folder / "step-70").mkdir()
    (folder / "notes.tmp-mine").mkdir()
    (folder / step_name(80)).write_text("a file")
    (folder / "latest").write_text("step 50, they say")
    return {step_name(50), step_name(60), "step-70", "notes.tmp-mine", step_name(80), "latest"}


def test_the_newest_whole_step_is_chosen_and_only_our_garbage_removed(tmp_path: Path) -> None:
    for step in (2, 5, 30):
        save(state_at(step, 0, 1), tmp_path / step_name(step))
    foreign = litter(tmp_path)
    manager = CheckpointManager(tmp_path, in_background=False)
    assert manager.steps() == [2, 5, 30]
    assert manager.latest() == 30
    assert_is_step(manager.load(state_at(0, 0, 1, filled=False)).state, 30, 0, 1)
    assert {p.name for p in tmp_path.iterdir()} == foreign | {step_name(s) for s in (2, 5, 30)}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_directory_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2):
        save(state_at(step, 0, 1), tmp_path / step_name(step))
    (tmp_path / step_name(2)).chmod(0)
    assert committed_steps(tmp_path) == [1]


def test_a_damaged_newest_step_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2):
        save(state_at(step, 0, 1), tmp_path / step_name(step))
    (tmp_path / step_name(2) / "__0_0.distcp").unlink()
    assert committed_steps(tmp_path) == [1]


def meet_what_is_there(rank: int, size: int, folder: str) -> str:
    """A directory where the checkpoint should go is an error on all ranks, and no hang."""
    with pytest.raises(CheckpointExistsError, match="exists; a checkpoint is never written over") as caught:
        save(state_at(1, rank, size), folder)
    return str(caught.value)


def test_an_existing_directory_is_an_error_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    texts = ranks.run(2, meet_what_is_there, str(tmp_path / "x"))
    assert len(set(texts)) == 1


def load_with_a_stale_listing(rank: int, size: int, folder: str) -> int:
    """Rank 1 sees an older directory than rank 0, as over NFS."""
    listed = manager_module.committed_steps

    def stale(directory: Any) -> list[int]:
        return listed(directory)[:-1] if rank else listed(directory)

    manager_module.committed_steps = stale
    try:
        manager = CheckpointManager(folder, in_background=False)
        report = manager.load(state_at(0, rank, size, filled=False))
    finally:
        manager_module.committed_steps = listed
    step: int = report.state["step"]
    assert_is_step(report.state, step, rank, size)
    return step


def test_all_ranks_load_the_step_that_rank_zero_sees(ranks: RankPool, tmp_path: Path) -> None:
    for step in (3, 4):
        save(state_at(step, 0, 1), tmp_path / step_name(step))
    assert ranks.run(2, load_with_a_stale_listing, str(tmp_path)) == [4, 4]


def test_an_empty_directory_holds_no_checkpoint(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "new", in_background=False)
    assert manager.latest() is None
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
        manager.load({})


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [(1, None, [6]), (3, None, [4, 5, 6]), (1, 2, [2, 4, 6]), (9, None, [1, 2, 3, 4, 5, 6])],
)
@pytest.mark.parametrize("background", [False, True])
def test_the_newest_few_are_kept(
    tmp_path: Path, keep: int, keep_every: int | None, left: list[int], background: bool
) -> None:
    manager = CheckpointManager(tmp_path, keep=keep, keep_every=keep_every, in_background=background)
    for step in range(1, 7):
        manager.save(step, state_at(step, 0, 1))
    manager.close()
    assert committed_steps(tmp_path) == left
    assert len(list(tmp_path.iterdir())) == len(left)


def test_the_last_good_one_is_never_deleted_for_a_damaged_newer_one(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1, in_background=False)
    manager.save(1, state_at(1, 0, 1))
    save(state_at(2, 0, 1), tmp_path / step_name(2))
    (tmp_path / step_name(2) / "__0_0.distcp").write_bytes(b"")
    manager.wait()
    assert committed_steps(tmp_path) == [1]


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep_every": 0}])
def test_keeping_nothing_is_refused(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        CheckpointManager(tmp_path, **options)
