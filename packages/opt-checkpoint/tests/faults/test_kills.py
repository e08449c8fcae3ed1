"""F2, F3, F10: SIGKILL at any moment leaves the newest committed checkpoint whole, and the next run resumes from it."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from failing_calls import Calls
from states import assert_is_step, state_at

from opt_checkpoint import CheckpointManager, committed_steps, save, verify_checkpoint
from opt_checkpoint.run.series import step_name
from opt_checkpoint.store.lease import LEASE

sys.path.insert(0, str(Path(__file__).parent))

from killed_ranks import run_until_killed, save_and_die, save_at_once
from processes import start


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
            os.utime(killed, (0, 0))
            for file in killed.iterdir():
                os.utime(file, (0, 0))
    manager.save(steps[-1] + 1, state_at(steps[-1] + 1, 0, 1))
    assert sorted(p.name for p in folder.iterdir()) == [step_name(s) for s in (*steps, steps[-1] + 1)]
    return steps[-1]


@pytest.mark.nightly  # the moment is drawn
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_killed_at_a_random_moment_the_next_run_resumes(tmp_path: Path, full: bool, background: bool) -> None:
    rng = random.Random(background)
    newest = 0
    for _ in range(100 if full else 2):
        victims = rng.choice([[0], [1], [0, 1]])
        codes = run_until_killed(2, tmp_path, background, rng.random() * 0.2, victims)
        assert -signal.SIGKILL in codes
        reached = check_restart(tmp_path)
        assert reached >= newest
        newest = reached
    assert newest > 0


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


@pytest.mark.nightly  # a race
def test_of_jobs_that_save_one_step_at_once_one_wins(tmp_path: Path, full: bool) -> None:
    for trial in range(20 if full else 3):
        folder = tmp_path / str(trial)
        start_at = time.time() + 0.5
        jobs = [start(save_at_once, str(folder), 7, start_at) for _ in range(3)]
        for job in jobs:
            job.join(60)
        codes = sorted(job.exitcode for job in jobs)
        assert codes == [0, 3, 3]
        assert check_restart(folder) == 7
