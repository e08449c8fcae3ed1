"""F9, F18: other files next to checkpoints, and ranks that do not see the same directory."""

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_ranks import on_threads, save_as_ranks
from failing_calls import Calls, bucket_in, error, failing, failing_at, flip_bit, objects_in, put
from states import assert_is_step, state_at

from opt_checkpoint import (
    CheckpointFailedError,
    CheckpointManager,
    CheckpointNotFoundError,
    ObjectPath,
    committed_steps,
    save,
    verify_checkpoint,
)
from opt_checkpoint.run import series as series_module
from opt_checkpoint.run.series import step_name
from opt_checkpoint.store import lease as lease_module
from opt_checkpoint.store import store_at
from opt_checkpoint.store.lease import LEASE, Process

TOKEN = "0123456789abcdef" * 2


def age(folder: Path, *, seconds: float = 3600) -> None:
    """Make a directory look as if it was last written an hour ago, or this number of seconds."""
    for path in (*folder.iterdir(), folder):
        os.utime(path, (time.time() - seconds,) * 2)


OURS = {  # with the files of saves and exports
    f".opt-checkpoint-tmp-{TOKEN}": ["__0_0.distcp"],
    f".opt-checkpoint-deleting-{TOKEN}": ["model-00002-of-00002.safetensors", "model.safetensors.index.json"],
}


def litter(folder: Path) -> set[str]:
    """Make everything that may lie around; the names that must stay."""
    for name, files in OURS.items():
        (folder / name).mkdir()
        for file in files:
            (folder / name / file).write_bytes(b"half")
        age(folder / name)
    theirs = f".opt-checkpoint-tmp-{TOKEN[::-1]}"
    (folder / theirs).mkdir()
    (folder / theirs / "precious.txt").write_text("a name like ours only")
    age(folder / theirs)
    (folder / step_name(50)).mkdir()
    (folder / step_name(60)).mkdir()
    (folder / step_name(60) / "manifest.bin").write_bytes(b"{}")
    (folder / "step-70").mkdir()
    (folder / "notes.tmp-mine").mkdir()
    (folder / step_name(80)).write_text("a file")
    (folder / "latest").write_text("step 50, they say")
    (folder / "loop").symlink_to("loop")
    return {theirs, step_name(50), step_name(60), "step-70", "notes.tmp-mine", step_name(80), "latest", "loop"}


def test_the_newest_whole_step_wins_and_only_our_garbage_goes(tmp_path: Path) -> None:
    for step in (2, 5, 30):
        save(state_at(step, 0, 1), tmp_path / step_name(step))
    foreign = litter(tmp_path)
    manager = CheckpointManager(tmp_path, in_background=False)
    assert manager.steps() == [2, 5, 30]
    with pytest.warns(UserWarning, match=r"step-000000060 is damaged and is skipped: .*manifest"):
        assert_is_step(manager.load(state_at(0, 0, 1, filled=False)).state, 30, 0, 1)
    assert manager.latest() == 30
    manager.save(31, state_at(31, 0, 1))
    assert {p.name for p in tmp_path.iterdir()} == foreign | {step_name(s) for s in (5, 30, 31)}


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("name", ["manifest.bin", "__0_0.distcp", "the directory"])
def test_an_error_of_the_file_system_is_not_an_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, name: str
) -> None:
    """Else a run would silently start again from an older step, or from nothing."""
    for step in (1, 2):
        save(state_at(step, 0, 1), tmp_path / step_name(step))
    victim = tmp_path if name == "the directory" else tmp_path / step_name(2) / name
    failed = []

    def failing_for_victim(act: Callable[..., Any]) -> Callable[..., Any]:
        def fail(path: Any, *arguments: Any, **options: Any) -> Any:
            if Path(path) == victim:
                failed.append(path)
                error(code)
            return act(path, *arguments, **options)

        return fail

    for call in ("stat", "lstat", "open"):
        monkeypatch.setattr(os, call, failing_for_victim(getattr(os, call)))
    monkeypatch.setattr(Path, "lstat", lambda self: os.lstat(self))
    monkeypatch.setattr(Path, "iterdir", failing_for_victim(Path.iterdir))
    manager = CheckpointManager(tmp_path, in_background=False)
    goes_by_number = [manager.latest] if name != "__0_0.distcp" else []  # no data file is looked at
    for ask in (*goes_by_number, manager.steps, lambda: manager.load(state_at(0, 0, 1, filled=False))):
        with pytest.raises(CheckpointFailedError, match=rf"\[Errno {code}\]"):
            ask()
    assert failed


def test_the_newest_is_found_without_a_look_at_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save(state_at(step, 0, 1), tmp_path / step_name(step))
    monkeypatch.setattr(series_module, "read_committed", lambda path: pytest.fail(f"{path} is read"))
    assert CheckpointManager(tmp_path, in_background=False).latest() == 3


def test_a_dead_save_that_has_filled_the_disk_is_removed_first(tmp_path: Path) -> None:
    """Each later save failed before it removed the leftover, as there was no space for its lease."""
    left = tmp_path / f".opt-checkpoint-tmp-{TOKEN}"
    left.mkdir()
    (left / LEASE).write_text(json.dumps({"target": "x", **PARENT._replace(started="1")._asdict()}))

    def is_full(name: str, key: str) -> None:
        if left.exists() and name in ("create", "write"):
            raise error(errno.ENOSPC)

    with Calls(is_full):
        save(state_at(1, 0, 1), tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


THIS = Process.this()
PARENT = THIS._replace(pid=os.getppid(), started=lease_module._start_of(os.getppid()))
HOLDERS = {  # of a lease, and the minutes without a change after which it counts no more
    "a process that runs": (PARENT, 99),
    "a process that had the number of one of today": (PARENT._replace(started="1"), -1),
    "another machine": (THIS._replace(host="other", boot="another boot"), 10),
    "another pid namespace": (THIS._replace(namespace=THIS.namespace + 1, pid=2**22 + 1), 10),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_lease_is_valid_while_its_process_runs_or_by_age(tmp_path: Path, holder: str) -> None:
    """In another container a process has a number that here belongs to nobody, or to somebody else."""
    live = tmp_path / f".opt-checkpoint-tmp-{TOKEN}"
    (process, expires) = HOLDERS[holder]
    live.mkdir()
    (live / LEASE).write_text(json.dumps({"target": "x", **process._asdict()}))
    for minutes in (0, 9, 11):
        if live.exists():
            age(live, seconds=60 * minutes)
        save(state_at(1, 0, 1), tmp_path / str(minutes))
        assert live.exists() == (minutes < expires)


def test_a_temporary_directory_of_another_user_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / f".opt-checkpoint-tmp-{TOKEN}"
    other.mkdir()
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: error(errno.EACCES) if path == other else listed(path))
    save(state_at(1, 0, 1), tmp_path / "x")
    assert verify_checkpoint(tmp_path / "x") == []


def test_a_commit_holds_if_what_it_replaced_cannot_be_removed(tmp_path: Path) -> None:
    """Symptom: it was reported as failed, as over NFS while a reader had a file open."""
    with CheckpointManager(tmp_path, in_background=False) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step, 0, 1))
        manager.load(state_at(0, 0, 1, filled=False), step=1)
        with Calls(failing(1, lambda name, _: name == "remove_tree", errno.ENOTEMPTY)):
            manager.save(2, state_at(3, 0, 1))
        assert_is_step(manager.load(state_at(0, 0, 1, filled=False)).state, 3, 0, 1)
        assert manager.series.abandoned() == {}


def test_a_small_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    for name in ("write", "rename"):
        with Calls(failing(1, lambda called, _, name=name: called == name, errno.ENOSPC)), pytest.raises(OSError):
            store.put("file", b"content")
    assert list(tmp_path.iterdir()) == []


def test_a_save_spares_another_running_save_of_its_process(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    folder = store.folder("x", TOKEN)
    store.begin("x", folder)
    for lives in (True, False):
        save(state_at(1, 0, 1), tmp_path / str(lives))
        assert store.path(folder).exists() == lives
        lease_module.release(folder)


IN_BUCKET = pytest.mark.parametrize(
    "in_bucket", [False, pytest.param(True, marks=pytest.mark.needs_extra)], ids=["disk", "bucket"]
)


@IN_BUCKET
def test_saves_of_one_process_leave_each_others_files_alone(tmp_path: Path, in_bucket: bool) -> None:
    """The folder of a running save looked dead before its lease was renewed by a thread, and during its commit."""
    place = (bucket_in if in_bucket else Path)(tmp_path)
    dead = list[str]()
    looking = list[str]()

    def look(name: str, key: str) -> None:
        if not looking:
            looking.append(name)
            dead.extend(f"{name} {left.folder}" for left in store_at(place).leftovers() if left.writer is None)
            looking.clear()

    with Calls(look, after=look) as calls:
        save(state_at(1, 0, 1), place / "x")
    assert len(calls.made) > 20
    assert dead == []


@pytest.mark.needs_extra
def test_foreign_objects_below_a_step_stay(tmp_path: Path) -> None:
    """Neither a folder nor an object with a name like that of a save is the folder of a dead save."""
    bucket = bucket_in(tmp_path)
    foreign = [f"x/notes/{TOKEN}", f"x/{TOKEN}"]
    for name in foreign:
        put(bucket / name, b"precious")
    assert store_at(bucket).leftovers() == []
    save(state_at(1, 0, 1), bucket / "x")
    assert {f"x/{name}" for name in objects_in(bucket / "x")} >= set(foreign)


def test_a_save_does_not_take_its_own_folder_for_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read of its new folder that failed was logged as one of a folder "which an interrupted save left"."""
    looked_at: list[str] = []
    monkeypatch.setattr(Path, "lstat", lambda self: looked_at.append(self.name) or error(errno.EIO))
    save(state_at(1, 0, 1), tmp_path / "x")
    assert not [name for name in looked_at if name.startswith(".opt-checkpoint-tmp-")]
    assert caplog.text == ""


@pytest.mark.needs_extra
def test_a_lease_is_renewed_until_it_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a save that takes more than ten minutes is deleted by another host."""
    pytest.importorskip("obstore")
    monkeypatch.setattr(lease_module, "RENEW_S", 0.01)
    bucket = store_at(ObjectPath.at(f"memory://lease-{tmp_path.name}/run"))
    changed = {  # when a lease was last renewed
        store_at(tmp_path): lambda lease: (tmp_path / lease).stat().st_mtime_ns,
        bucket: lambda lease: bucket._head(lease)["last_modified"],
    }
    for store, when in changed.items():
        folder = store.folder("x", TOKEN)
        store.begin("x", folder)
        lease = f"{folder}/{LEASE}"
        deadline = time.monotonic() + 20
        first = when(lease)
        while when(lease) == first:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (thread,) = [t for t in threading.enumerate() if TOKEN in t.name]
        lease_module.release(folder)
        assert not thread.is_alive()


def contents(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.lstat().st_mtime_ns for p in folder.rglob("*")}


@IN_BUCKET
def test_opening_loading_and_closing_a_manager_changes_nothing(tmp_path: Path, in_bucket: bool) -> None:
    for step in range(1, 7):
        save(state_at(step, 0, 1), tmp_path / step_name(step))
    litter(tmp_path)
    if in_bucket:
        (tmp_path / "loop").unlink()  # buckets have no links
    before = contents(tmp_path)
    place = (bucket_in if in_bucket else Path)(tmp_path)
    with Calls() as calls:
        for background in (False, True):
            evaluator = CheckpointManager(place, keep=1, in_background=background)
            evaluator.load(state_at(0, 0, 1, filled=False))
            evaluator.wait()
            evaluator.close()
        verify_checkpoint(place / step_name(6))
    assert contents(tmp_path) == before
    assert set(calls.names) <= {"get", "get_ranges", "head", "listing", "folders"}


def test_an_unremovable_checkpoint_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stuck = Calls(failing(9, lambda name, key: name == "remove_tree", errno.EBUSY))
    with stuck, CheckpointManager(tmp_path, keep=1, in_background=False) as manager:
        manager.save(1, state_at(1, 0, 1))
        manager.save(2, state_at(2, 0, 1))
        assert manager.latest() == 2
    assert "could not remove old checkpoints" in caplog.text


@pytest.mark.parametrize("name", ["x" * 255, "ü" * 127])
def test_the_longest_names_can_be_saved_failed_and_saved_again(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointFailedError, match="No space left"), failing_at(9, errno.ENOSPC):
        save(state_at(1, 0, 1), tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    save(state_at(1, 0, 1), tmp_path / name)
    assert verify_checkpoint(tmp_path / name) == []


def test_all_ranks_load_the_newest_good_step_that_rank_zero_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 sees an older directory than rank 0, as over NFS."""
    save_as_ranks([state_at(3, rank, 2) for rank in range(2)], tmp_path / step_name(3))
    save_as_ranks([state_at(4, rank, 2) for rank in range(2)], tmp_path / step_name(4))
    save_as_ranks([state_at(5, rank, 2) for rank in range(2)], tmp_path / step_name(5))
    flip_bit(tmp_path / step_name(5) / "__0_0.distcp")  # which rank 1 verifies
    here = threading.local()
    listed = series_module.named_steps
    monkeypatch.setattr(series_module, "named_steps", lambda store: listed(store)[: -1 if here.rank else None])

    def act(ranks: Any) -> None:
        here.rank = ranks.rank
        manager = CheckpointManager(tmp_path, in_background=False, process_group=ranks)
        report = manager.load(state_at(0, ranks.rank, 2, filled=False))
        assert_is_step(report.state, 4, ranks.rank, 2)
        manager.save(5, state_at(5, ranks.rank, 2))
        assert manager.steps() == [3, 4, 5]

    with pytest.warns(match="step-000000005 is damaged and is skipped"):
        assert on_threads(2, act) == [None, None]


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"), [(1, None, [6]), (3, None, [4, 5, 6]), (1, 2, [2, 4, 6]), (9, None, [*range(1, 7)])]
)
def test_old_checkpoints_are_removed_off_the_training_thread(
    tmp_path: Path, keep: int, keep_every: int | None, left: list[int]
) -> None:
    threads: set[str] = set()
    note = lambda name, key: threads.add(threading.current_thread().name) if name == "remove_tree" else None
    with Calls(note), CheckpointManager(tmp_path, keep=keep, keep_every=keep_every) as manager:
        with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
            manager.load({})
        for step in range(1, 7):
            manager.save(step, state_at(step, 0, 1))
    assert bool(threads) == (len(left) < 6)
    assert threading.current_thread().name not in threads
    assert committed_steps(tmp_path) == left
    assert len(list(tmp_path.iterdir())) == len(left)
