"""Jobs that are killed: processes cheap to start, since they are forked from one that has imported torch."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

from failing_calls import WRITES, Calls, at, bucket_in, die
from processes import join_world, new_meeting, start
from states import state_at

from opt_checkpoint import CheckpointFailedError, CheckpointManager, TieredCheckpointManager, committed_steps, save
from opt_checkpoint.run.series import step_name


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


def save_and_die(folder: str, step: int, call: int) -> None:
    """A save that is killed before its given call to the file system."""
    with at(call, die):
        save(state_at(step, 0, 1), Path(folder) / step_name(step))
    os._exit(0)


def save_to_store_and_die(folder: str, step: int, number: int) -> None:
    """A save to a store that is killed before the given request that writes."""
    calls = Calls()
    calls.before = lambda *call: die() if sum(name in WRITES for name in calls.names) == number else None
    with calls:
        save(state_at(step, 0, 1), bucket_in(folder) / step_name(step))
    os._exit(0)


class DyingCopies(Calls):
    """Kills this process, for real, when it has begun to write another rank's copy of a step."""

    def __init__(self, rank: int, step: int) -> None:
        super().__init__(self._die_in_copy, after=self._note)
        self._own, self._step = f"rank-{rank:05d}", step_name(step)
        self._in_exchange = False

    def _note(self, name: str, key: str) -> None:
        if name == "rename" and self._step in key and self.details[-1].endswith(self._own):
            self._in_exchange = True  # the own part is there

    def _die_in_copy(self, name: str, key: str) -> None:
        if self._in_exchange and name == "write":
            die()


def save_tiers_and_die(rank: int, size: int, meeting: str, folder: str, victim: int) -> None:
    """Save step 1, then step 2, in the middle of whose replication one rank dies; exits 3 on a clean error."""
    join_world(rank, size, meeting, timeout_s=20)
    calls = DyingCopies(rank, 2) if rank == victim else Calls()
    node = f"node-{rank}"
    options = {"durable_every": 100, "keep_local": 2, "timeout_s": 20.0}
    manager = TieredCheckpointManager(f"{folder}/{node}", f"{folder}/durable", node=node, **options)
    try:
        with calls:
            for step in (1, 2):
                manager.save(step, state_at(step, rank, size))
            manager.wait()
    except CheckpointFailedError:
        os._exit(3)
    os._exit(0)
