"""Power that is lost or a kill at any call: a committed checkpoint is whole, and what was not synced is lost."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoint_ranks import save_as_ranks
from failing_calls import Calls, LossyCalls, PowerLoss, at, bucket_in, die
from processes import start
from states import assert_is_step, state_at
from tiers import NIGHT

from opt_checkpoint import CheckpointManager, ObjectPath, committed_steps, save, verify_checkpoint
from opt_checkpoint.run.series import step_name
from opt_checkpoint.store.lease import LEASE

SIZE = 2


def states(step: int) -> list[dict[str, object]]:
    return [state_at(step, rank, SIZE) for rank in range(SIZE)]


@pytest.mark.parametrize("rename_lasts", [True, False])
def test_power_loss_at_any_call_keeps_the_newest_commit_whole(tmp_path: Path, rename_lasts: bool) -> None:
    with Calls() as counting:
        save_as_ranks(states(1), tmp_path / "counted")
    for call in range(1, len(counting.made) + 2):
        folder = tmp_path / str(call)
        possible = ([1], [1, 2])
        save_as_ranks(states(1), folder / step_name(1))
        calls = LossyCalls(call, rename_lasts=rename_lasts)
        with suppress(PowerLoss), calls:
            save_as_ranks(states(2), folder / step_name(2))
            possible = ([1, 2],)
        calls.after_loss()
        assert committed_steps(folder) in possible
        check_restart(folder)


def test_directories_above_a_first_checkpoint_survive_power_loss(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with LossyCalls(10_000, rename_lasts=False) as calls:
        save_as_ranks(states(1), tmp_path / "there" / "new" / "run" / step_name(1))
    calls.after_loss()
    assert committed_steps(tmp_path / "there" / "new" / "run") == [1]


# ----- kills


def check_restart(place: Path | ObjectPath) -> int:
    """Every committed step is whole and equals what was saved; a restart resumes from the newest, and clears up when
    it saves."""
    steps = committed_steps(place)
    folder = place if isinstance(place, Path) else Path("/") / place.key
    for step in steps:
        assert verify_checkpoint(place / step_name(step)) == []
    manager = CheckpointManager(place, keep=10_000, in_background=False)
    assert_is_step(manager.load(state_at(0, 0, 1, filled=False)).state, steps[-1], 0, 1)
    if not any(lease.stat().st_size for lease in folder.rglob(LEASE)):  # not yet written, or removed before the commit
        for path in folder.rglob("*"):
            os.utime(path, (0, 0))
    manager.save(3, state_at(3, 0, 1))
    left = {path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()}
    assert left == {step_name(step) for step in (*steps, 3)}
    return steps[-1]


def save_and_die(folder: str, in_bucket: bool, call: int) -> None:
    """A save that is killed before its given call to the file system, or request."""
    with at(call, die):
        save(state_at(2, 0, 1), (bucket_in if in_bucket else Path)(folder) / step_name(2))
    os._exit(0)


@pytest.mark.parametrize(
    "in_bucket", [False, pytest.param(True, marks=pytest.mark.needs_extra)], ids=["disk", "bucket"]
)
def test_a_kill_at_any_file_system_call_keeps_the_newest_whole(tmp_path: Path, in_bucket: bool) -> None:
    place_in = bucket_in if in_bucket else Path
    save(state_at(1, 0, 1), place_in(tmp_path) / step_name(1))
    with Calls() as counting:
        save(state_at(2, 0, 1), place_in(tmp_path) / step_name(2))
    commit = 1 + max(n for n, name in enumerate(counting.names) if name == ("create" if in_bucket else "rename"))
    last = len(counting.made)
    for call in range(1, last + 1) if NIGHT else {2, 7, commit - 2, commit, last}:
        place = place_in(tmp_path / str(call))
        save(state_at(1, 0, 1), place / step_name(1))
        process = start(save_and_die, str(tmp_path / str(call)), in_bucket, call)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        assert check_restart(place) == (2 if call > commit else 1)
