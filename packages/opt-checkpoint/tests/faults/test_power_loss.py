"""F4: what was not synced is lost with the power; a committed checkpoint is whole nevertheless."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoint_ranks import save_as_ranks
from disks import CountingFiles, LossyFiles, PowerLoss
from states import assert_is_step, state_at

from opt_checkpoint import CheckpointManager, committed_steps, verify_checkpoint
from opt_checkpoint.disk.files import LocalFiles
from opt_checkpoint.run.series import step_name

SIZE = 2


def states(step: int) -> list[dict[str, object]]:
    return [state_at(step, rank, SIZE) for rank in range(SIZE)]


def lose_power(folder: Path, call: int, rename_lasts: bool, files_type: type[LossyFiles] = LossyFiles) -> None:
    save_as_ranks(states(1), folder / step_name(1))
    files = files_type(call, rename_lasts=rename_lasts)
    committed = False
    try:
        save_as_ranks(states(2), folder / step_name(2), files=files)
        committed = True
    except PowerLoss:
        pass
    files.after_loss()
    steps = committed_steps(folder)
    assert steps == [1, 2] if committed else steps in ([1], [1, 2])
    for step in steps:
        assert verify_checkpoint(folder / step_name(step)) == []
    restarted = CheckpointManager(folder, in_background=False)
    assert_is_step(restarted.load(state_at(0, 0, 1, filled=False)).state, steps[-1], 0, 1)
    for entry in (*folder.iterdir(), *folder.glob("*/*")):
        os.utime(entry, (0, 0))  # the machine was off for a while
    restarted.save(3, state_at(3, 0, 1))
    assert sorted(p.name for p in folder.iterdir()) == [step_name(s) for s in (*steps, 3)]


def calls_of_a_save(folder: Path) -> int:
    files = CountingFiles()
    save_as_ranks(states(1), folder / "counted", files=files)
    return len(files.calls)


@pytest.mark.parametrize("rename_lasts", [True, False])
def test_losing_power_at_any_call_leaves_the_newest_committed_checkpoint_whole(
    tmp_path: Path, rename_lasts: bool
) -> None:
    for call in range(1, calls_of_a_save(tmp_path / "count") + 2):
        lose_power(tmp_path / str(call), call, rename_lasts)


@pytest.mark.parametrize("forgotten", ["fsync", "sync_dir"])
def test_the_model_catches_a_forgotten_sync(tmp_path: Path, forgotten: str) -> None:
    """Were one of the syncs left out, the test above would fail."""

    def skip(self: LossyFiles, what: object) -> None:
        if isinstance(what, int):
            self._before("fsync")
        else:
            self._before("sync_dir")

    forgetful = type("Forgetful", (LossyFiles,), {forgotten: skip})
    with pytest.raises(AssertionError):
        lose_power(tmp_path / "x", calls_of_a_save(tmp_path / "count") + 1, True, forgetful)
    assert LocalFiles.fsync is not skip


def test_the_directories_above_a_first_checkpoint_survive_a_loss_of_power(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    files = LossyFiles(10_000, rename_lasts=False)
    save_as_ranks(states(1), tmp_path / "there" / "new" / "run" / step_name(1), files=files)
    files.after_loss()
    assert committed_steps(tmp_path / "there" / "new" / "run") == [1]
