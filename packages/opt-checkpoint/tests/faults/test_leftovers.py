"""F9, F18: other files next to checkpoints, and ranks that do not see the same directory."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
from checkpoint_ranks import RankPool
from disks import CountingFiles, failing_at
from states import assert_is_step, state_at

from opt_checkpoint import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointFailedError,
    CheckpointManager,
    CheckpointNotFoundError,
    ObjectPath,
    committed_steps,
    save,
    verify_checkpoint,
)
from opt_checkpoint.disk import lease as lease_module
from opt_checkpoint.disk.files import LocalFiles
from opt_checkpoint.disk.lease import LEASE, Lease, Process
from opt_checkpoint.disk.object_target import ObjectTarget
from opt_checkpoint.run import series as series_module
from opt_checkpoint.run.series import step_name

TOKEN = "0123456789abcdef" * 2


def age(folder: Path, *, seconds: float = 3600) -> None:
    """Make a directory look as if it was last written an hour ago, or this number of seconds."""
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - seconds,) * 2)


def litter(folder: Path) -> set[str]:
    """Make everything that may lie around; the names that must stay."""
    for name in (f"{step_name(9)}.tmp-{TOKEN}", f"{step_name(1)}.deleting-{TOKEN}"):
        (folder / name).mkdir()
        (folder / name / "__0_0.distcp").write_bytes(b"half")
        age(folder / name)
    (folder / step_name(50)).mkdir()
    (folder / step_name(60)).mkdir()
    (folder / step_name(60) / "manifest.bin").write_bytes(b"{}")
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
    manager.save(31, state_at(31, 0, 1))
    assert {p.name for p in tmp_path.iterdir()} == foreign | {step_name(s) for s in (5, 30, 31)}


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", ["step-000000002", "manifest.bin", "__0_0.distcp"])
def test_an_error_of_the_file_system_is_not_an_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, name: str
) -> None:
    """Else a run would silently start again from an older step, or from nothing."""
    for step in (1, 2):
        save(state_at(step, 0, 1), tmp_path / step_name(step))
    os_open, os_lstat, failed = os.open, os.lstat, []

    def fail(path: Any) -> None:
        if Path(path).name == name and "step-000000002" in str(path):
            failed.append(path)
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "open", lambda path, *a, **k: fail(path) or os_open(path, *a, **k))
    monkeypatch.setattr(os, "lstat", lambda path, *a, **k: fail(path) or os_lstat(path, *a, **k))
    monkeypatch.setattr(Path, "lstat", lambda self: os.lstat(self))
    monkeypatch.setattr(Path, "stat", lambda self, *, follow_symlinks=True: fail(self) or os.stat(self))
    manager = CheckpointManager(tmp_path, in_background=False)
    for ask in (manager.latest, manager.steps, lambda: manager.load(state_at(0, 0, 1, filled=False))):
        with pytest.raises(CheckpointFailedError, match=rf"\[Errno {error}\]"):
            ask()
    assert failed


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_directory_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    save(state_at(1, 0, 1), tmp_path / step_name(1))
    iterdir = Path.iterdir

    def refused(self: Path) -> Any:
        if self == tmp_path:
            raise OSError(error, os.strerror(error))
        return iterdir(self)

    monkeypatch.setattr(Path, "iterdir", refused)
    manager = CheckpointManager(tmp_path, in_background=False)
    for ask in (manager.latest, manager.steps, lambda: manager.load(state_at(0, 0, 1, filled=False))):
        with pytest.raises(CheckpointFailedError, match=rf"\[Errno {error}\]"):
            ask()


def test_when_all_checkpoints_are_damaged_none_is_not_the_answer(tmp_path: Path) -> None:
    for step in (1, 2):
        save(state_at(step, 0, 1), tmp_path / step_name(step))
        (tmp_path / step_name(step) / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointCorruptError, match=r"every checkpoint in .* is damaged: step-000000002, step-"):
        CheckpointManager(tmp_path, in_background=False).latest()


def test_the_newest_is_found_without_a_look_at_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save(state_at(step, 0, 1), tmp_path / step_name(step))
    read: list[str] = []
    plain = series_module.read_committed
    monkeypatch.setattr(series_module, "read_committed", lambda path: read.append(path.name) or plain(path))
    assert CheckpointManager(tmp_path, in_background=False).latest() == 3
    assert read == [step_name(3)]


ANOTHER_SAVE = """
import sys
from pathlib import Path
from opt_checkpoint.disk.files import LocalFiles
from opt_checkpoint.disk.lease import Lease
Lease.in_directory(LocalFiles(), Path(sys.argv[1]), "step-000000009")
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_directory_of_a_save_under_way_in_another_process_stays_until_that_process_is_gone(tmp_path: Path) -> None:
    live = tmp_path / f".opt-checkpoint-tmp-{TOKEN}"
    live.mkdir()
    command = [sys.executable, "-c", ANOTHER_SAVE, str(live)]
    trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "ready\n"
    age(live)  # even if it has been stopped for an hour
    with CheckpointManager(tmp_path, in_background=False) as manager:
        manager.save(10, state_at(10, 0, 1))
        assert live.exists()
        trainer.kill()
        trainer.wait()
        manager.save(11, state_at(11, 0, 1))
    assert not live.exists()


def test_a_process_that_has_the_number_of_the_writer_is_not_taken_for_it(tmp_path: Path) -> None:
    live = tmp_path / f".opt-checkpoint-tmp-{TOKEN}"
    live.mkdir()
    holder = Process.this()._replace(pid=os.getppid(), started="1")
    (live / LEASE).write_text(json.dumps({"target": "x", **holder._asdict()}))
    save(state_at(1, 0, 1), tmp_path / "one")
    assert not live.exists()


def test_a_lease_of_another_machine_counts_by_its_age(tmp_path: Path) -> None:
    live = tmp_path / f".opt-checkpoint-tmp-{TOKEN}"
    live.mkdir()
    holder = {"target": "x", **Process.this()._replace(host="other", boot="another boot")._asdict()}
    (live / LEASE).write_text(json.dumps(holder))
    save(state_at(1, 0, 1), tmp_path / "one")
    assert live.exists()
    age(live, seconds=9 * 60)
    save(state_at(1, 0, 1), tmp_path / "nine minutes")
    assert live.exists()
    age(live, seconds=11 * 60)
    save(state_at(2, 0, 1), tmp_path / "two")
    assert not live.exists()


def test_a_live_save_in_another_pid_namespace_counts_by_its_age(tmp_path: Path) -> None:
    """In another container its process has a number that here belongs to nobody, or to somebody else."""
    live = tmp_path / f".opt-checkpoint-tmp-{TOKEN}"
    live.mkdir()
    this = Process.this()
    holder = {"target": "x", **this._replace(namespace=this.namespace + 1, pid=2**22 + 1)._asdict()}
    (live / LEASE).write_text(json.dumps(holder))
    save(state_at(1, 0, 1), tmp_path / "one")
    assert live.exists()
    age(live, seconds=11 * 60)
    save(state_at(1, 0, 1), tmp_path / "two")
    assert not live.exists()


@pytest.mark.needs_extra
def test_a_lease_is_renewed_until_it_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a save that takes more than ten minutes is deleted by another host."""
    pytest.importorskip("obstore")
    monkeypatch.setattr(lease_module, "RENEW_S", 0.01)
    for held in (
        Lease.in_directory(LocalFiles(), tmp_path, "x"),
        object_lease(ObjectPath.at(f"memory://lease-{tmp_path.name}/run")),
    ):
        first, deadline = held.renewed, time.monotonic() + 20
        while held.renewed == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        held.release()
        assert not held._thread.is_alive()


def object_lease(place: ObjectPath) -> Lease:
    target = ObjectTarget(place, TOKEN)
    target.begin()
    assert target._lease is not None
    return target._lease


def test_a_save_leaves_the_temporary_directory_of_another_save_of_this_process_alone(tmp_path: Path) -> None:
    class SaveInBetween(CountingFiles):
        """Saves something else in the same directory before the first `fsync`."""

        def fsync(self, fd: int) -> None:
            if "fsync" not in self.calls:
                save(state_at(5, 0, 1), tmp_path / "other")
            super().fsync(fd)

    save(state_at(1, 0, 1), tmp_path / "x", files=SaveInBetween())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "x"]


def contents(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.lstat().st_mtime_ns for p in folder.rglob("*")}


def test_opening_loading_and_closing_a_manager_changes_nothing(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(state_at(step, 0, 1), tmp_path / step_name(step))
    litter(tmp_path)
    before = contents(tmp_path)
    for background in (False, True):
        evaluator = CheckpointManager(tmp_path, keep=1, in_background=background)
        evaluator.load(state_at(0, 0, 1, filled=False))
        evaluator.wait()
        evaluator.close()
    assert contents(tmp_path) == before


def test_old_checkpoints_are_removed_off_the_training_thread(tmp_path: Path) -> None:
    class Recording(CountingFiles):
        threads: ClassVar[set[str]] = set()

        def remove_tree(self, path: Path) -> None:
            self.threads.add(threading.current_thread().name)
            super().remove_tree(path)

    with CheckpointManager(tmp_path, keep=1, files=Recording()) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step, 0, 1))
    assert committed_steps(tmp_path) == [3]
    assert Recording.threads
    assert threading.current_thread().name not in Recording.threads


def test_a_checkpoint_that_cannot_be_removed_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck(CountingFiles):
        def remove_tree(self, path: Path) -> None:
            raise OSError(errno.EBUSY, "busy")

    with CheckpointManager(tmp_path, keep=1, in_background=False, files=Stuck()) as manager:
        manager.save(1, state_at(1, 0, 1))
        manager.save(2, state_at(2, 0, 1))
        assert manager.latest() == 2
    assert "could not remove old checkpoints" in caplog.text


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127])
def test_the_longest_names_can_be_saved_failed_and_saved_again(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointFailedError, match="No space left"):
        save(state_at(1, 0, 1), tmp_path / name, files=failing_at(9, errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []
    save(state_at(1, 0, 1), tmp_path / name)
    assert verify_checkpoint(tmp_path / name) == []


def test_a_deletion_that_was_itself_interrupted_is_finished_by_the_next_save(tmp_path: Path) -> None:
    for name in (f"x.tmp-{TOKEN}.deleting-{TOKEN}", f".opt-checkpoint-deleting-{TOKEN}"):
        (tmp_path / name).mkdir()
    save(state_at(1, 0, 1), tmp_path / "x")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_damaged_newest_step_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2):
        save(state_at(step, 0, 1), tmp_path / step_name(step))
    (tmp_path / step_name(2) / "__0_0.distcp").unlink()
    assert committed_steps(tmp_path) == [1]


def meet_what_is_there(rank: int, size: int, folder: str) -> str:
    """A directory where the checkpoint should go is an error on all ranks, and no hang."""
    with pytest.raises(CheckpointExistsError, match="exists, and a checkpoint is never overwritten") as caught:
        save(state_at(1, rank, size), folder)
    return str(caught.value)


def test_an_existing_directory_is_an_error_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    texts = ranks.run(2, meet_what_is_there, str(tmp_path / "x"))
    assert len(set(texts)) == 1


def load_with_a_stale_listing(rank: int, size: int, folder: str) -> int:
    """Rank 1 sees an older directory than rank 0, as over NFS."""
    listed = series_module.named_steps

    def stale(directory: Any) -> list[tuple[int, Path]]:
        return listed(directory)[:-1] if rank else listed(directory)

    series_module.named_steps = stale
    try:
        manager = CheckpointManager(folder, in_background=False)
        report = manager.load(state_at(0, rank, size, filled=False))
    finally:
        series_module.named_steps = listed
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
    manager._retire(1)
    assert committed_steps(tmp_path) == [1]


@pytest.mark.parametrize("background", [False, True])
def test_the_step_just_saved_stays_where_a_run_went_back(tmp_path: Path, background: bool) -> None:
    """A run went back from step 9 to 2 and saved step 3, which was removed at once: it was not the newest by number."""
    for step in (2, 9):
        save(state_at(step, 0, 1), tmp_path / step_name(step))
    with CheckpointManager(tmp_path, keep=1, in_background=background) as manager:
        manager.save(3, state_at(3, 0, 1))
    assert committed_steps(tmp_path) == [3]
    assert verify_checkpoint(tmp_path / step_name(9)) == []  # abandoned, and there until the run saves a later step


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep_every": 0}])
def test_keeping_nothing_is_refused(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        CheckpointManager(tmp_path, **options)
