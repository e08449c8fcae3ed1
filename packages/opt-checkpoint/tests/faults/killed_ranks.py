"""Jobs that are killed: processes cheap to start, since they are forked from one that has imported torch."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import stores
from disks import dying_at
from processes import join_world, new_meeting, start
from states import state_at
from stores import faulty

from opt_checkpoint import CheckpointFailedError, CheckpointManager, ObjectPath, TieredCheckpointManager, save
from opt_checkpoint.run.local_tier import UnsyncedFiles
from opt_checkpoint.run.series import step_name


def train_and_save(rank: int, size: int, meeting: str, folder: str, background: bool, steps: int) -> None:
    """Resume from the newest step, then save step after step until killed."""
    join_world(rank, size, meeting)
    manager = CheckpointManager(folder, keep=2, in_background=background)
    start = manager.latest() or 0
    for step in range(start + 1, start + 1 + steps):
        manager.save(step, state_at(step, rank, size))
    manager.close()
    os._exit(0)


def save_and_die(folder: str, step: int, call: int) -> None:
    """A save that is killed before its given call to the file system."""
    save(state_at(step, 0, 1), Path(folder) / step_name(step), files=dying_at(call))
    os._exit(0)


def save_to_store_and_die(folder: str, step: int, number: int) -> None:
    """A save to a store that is killed before the given request that writes."""
    place, client = faulty(ObjectPath.at(f"file://{folder}/{step_name(step)}"))
    client.before = stores.dying_at(number)
    save(state_at(step, 0, 1), place)
    os._exit(0)


class DyingCopies(UnsyncedFiles):
    """Kills this process, for real, when it has begun to write another rank's copy of a step."""

    def __init__(self, rank: int, step: int) -> None:
        self._copy = re.compile(rf"{step_name(step)}/\.opt-checkpoint-tmp-")
        self._own = f"rank-{rank:05d}"
        self._in_exchange = False

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if target.name == self._own and self._copy.search(str(source)):
            self._in_exchange = True  # the own part is there

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self._in_exchange:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(fd, data)


def save_tiers_and_die(rank: int, size: int, meeting: str, folder: str, victim: int) -> None:
    """Save step 1, then step 2, in the middle of whose replication one rank dies; exits 3 on a clean error."""
    join_world(rank, size, meeting, timeout_s=20)
    files = DyingCopies(rank, 2) if rank == victim else None
    node = f"node-{rank}"
    options = {"durable_every": 100, "keep_local": 2, "timeout_s": 20.0}
    manager = TieredCheckpointManager(f"{folder}/{node}", f"{folder}/durable", node=node, local_files=files, **options)
    try:
        for step in (1, 2):
            manager.save(step, state_at(step, rank, size))
        manager.wait()
    except CheckpointFailedError:
        os._exit(3)
    os._exit(0)


def save_at_once(folder: str, step: int, start_at: float) -> None:
    """One of several jobs that save the same step; exits 0 when it won, 3 on a clean error."""
    while time.time() < start_at:
        time.sleep(0.001)
    try:
        save(state_at(step, 0, 1), Path(folder) / step_name(step))
    except ValueError:
        os._exit(3)
    os._exit(0)


def run_until_killed(size: int, folder: Path, background: bool, after_s: float, victims: list[int]) -> list[int]:
    """Start a world, kill some of its ranks a while after its first commit, then the rest; exit codes by rank."""

    def committed() -> set[str]:
        return {p.name for p in folder.glob("step-*")}

    before, meeting = committed(), new_meeting(folder.parent)
    arguments = (size, meeting, str(folder), background, 100_000)
    processes = [start(train_and_save, rank, *arguments) for rank in range(size)]
    deadline = time.monotonic() + 60
    while committed() <= before and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(after_s)
    for victim in victims:
        os.kill(processes[victim].pid, signal.SIGKILL)
    time.sleep(0.1)
    for process in processes:
        process.kill()
        process.join(30)
    return [process.exitcode for process in processes]
