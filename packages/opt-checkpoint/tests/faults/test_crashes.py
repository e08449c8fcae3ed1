"""Power that is lost or a kill at any call: a committed checkpoint is whole, and what was not synced is lost."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoint_ranks import save_as_ranks
from failing_calls import Calls, LossyCalls, PowerLoss, at, die
from processes import join_world, new_meeting, start
from states import assert_is_step, state_at

from opt_checkpoint import CheckpointManager, committed_steps, save, verify_checkpoint
from opt_checkpoint.run.series import step_name
from opt_checkpoint.store.lease import LEASE

SIZE = 2


def states(step: int) -> list[dict[str, object]]:
    return [state_at(step, rank, SIZE) for rank in range(SIZE)]


@pytest.mark.parametrize("rename_lasts", [True, False])
def test_losing_power_at_any_call_leaves_the_newest_committed_checkpoint_whole(
    tmp_path: Path, rename_lasts: bool
) -> None:
    with Calls() as counting:
        save_as_ranks(states(1), tmp_path / "counted")
    for call in range(1, len(counting.made) + 2):
        folder, possible = tmp_path / str(call), ([1], [1, 2])
        save_as_ranks(states(1), folder / step_name(1))
        calls = LossyCalls(call, rename_lasts=rename_lasts)
        with suppress(PowerLoss), calls:
            save_as_ranks(states(2), folder / step_name(2))
            possible = ([1, 2],)
        calls.after_loss()
        assert committed_steps(folder) in possible
        check_restart(folder)


def test_the_directories_above_a_first_checkpoint_survive_a_loss_of_power(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with LossyCalls(10_000, rename_lasts=False) as calls:
        save_as_ranks(states(1), tmp_path / "there" / "new" / "run" / step_name(1))
    calls.after_loss()
    assert committed_steps(tmp_path / "there" / "new" / "run") == [1]


# ----- kills


def check_restart(folder: Path) -> int:
    """Every committed step is whole and equals what was saved; a restart resumes from the newest, and clears up when
    it saves."""
    steps = committed_steps(folder)
    for step in steps:
        assert verify_checkpoint(folder / step_name(step)) == []
    manager = CheckpointManager(folder, keep=10_000, in_background=False)
    assert_is_step(manager.load(state_at(0, 0, 1, filled=False)).state, steps[-1], 0, 1)
    for killed in folder.glob(".opt-checkpoint-tmp-*"):
        lease = killed / LEASE
        if not lease.exists() or not lease.stat().st_size:  # killed before its lease was written, or before the commit
            for path in (*killed.iterdir(), killed):
                os.utime(path, (0, 0))
    manager.save(steps[-1] + 1, state_at(steps[-1] + 1, 0, 1))
    assert sorted(p.name for p in folder.iterdir()) == [step_name(s) for s in (*steps, steps[-1] + 1)]
    return steps[-1]


def save_and_die(folder: str, step: int, call: int) -> None:
    """A save that is killed before its given call to the file system."""
    with at(call, die):
        save(state_at(step, 0, 1), Path(folder) / step_name(step))
    os._exit(0)


def test_killed_before_any_call_to_the_file_system_the_newest_is_whole(tmp_path: Path, full: bool) -> None:
    with Calls() as counting:
        save(state_at(1, 0, 1), tmp_path / "counted")
    calls = range(1, len(counting.made) + 1)
    for call in calls if full else calls[::3]:
        folder = tmp_path / str(call)
        save(state_at(1, 0, 1), folder / step_name(1))
        process = start(save_and_die, str(folder), 2, call)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        renamed = counting.names.index("rename") + 1 < call
        assert check_restart(folder) == (2 if renamed else 1)


def save_until_killed(rank: int, size: int, meeting: str, folder: str, background: bool) -> None:
    """Resume from the newest step, then save step after step."""
    join_world(rank, size, meeting)
    manager = CheckpointManager(folder, keep=2, in_background=background)
    for step in itertools.count((manager.latest() or 0) + 1):
        manager.save(step, state_at(step, rank, size))


def run_until_killed(folder: Path, background: bool, after_s: float, victims: list[int]) -> list[int]:
    """Start two ranks, kill some of them a while after their first commit, then the rest; exit codes by rank."""
    before, meeting, deadline = committed_steps(folder), new_meeting(folder.parent), time.monotonic() + 60
    processes = [start(save_until_killed, rank, 2, meeting, str(folder), background) for rank in (0, 1)]
    while committed_steps(folder) == before and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(after_s)
    for victim in victims:
        os.kill(processes[victim].pid, signal.SIGKILL)
    time.sleep(0.1)
    for process in processes:
        process.kill()
        process.join(30)
    return [process.exitcode for process in processes]


@pytest.mark.nightly  # the moment is drawn
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_killed_at_a_random_moment_the_next_run_resumes(tmp_path: Path, background: bool) -> None:
    rng, reached = random.Random(background), [0]
    for _ in range(100):
        victims = rng.choice([[0], [1], [0, 1]])
        assert -signal.SIGKILL in run_until_killed(tmp_path / "run", background, rng.random() * 0.2, victims)
        reached.append(check_restart(tmp_path / "run"))
        assert reached[-1] > reached[-2]
