"""F5, F6: a disk that is full, broken or slow to accept bytes: a clean error on all ranks, or none at all."""

import errno
import os
import pickle
import shutil
import sys
import threading
from pathlib import Path

import pytest
from failing_calls import Calls, failing_at
from states import assert_is_step, state_at
from tiers import NIGHT

from opt_checkpoint import CheckpointFailedError, load, save, verify_checkpoint
from opt_checkpoint.store import store_at

ERRORS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.ESTALE]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_error_before_the_commit_commits_and_leaks_nothing(tmp_path: Path) -> None:
    save(state_at(1, 0, 1), tmp_path / "good")
    with Calls() as counting:
        save(state_at(2, 0, 1), tmp_path / "counted")
    fds = open_descriptors()
    threads = threading.active_count()
    for call in range(1, len(counting.made) + 1):
        for error in ERRORS if NIGHT else ERRORS[:1]:
            what = rf"^saving \S+ failed: OSError: \[Errno {error}\]"
            with pytest.raises(CheckpointFailedError, match=what) as caught, failing_at(call, error):
                save(state_at(2, 0, 1), tmp_path / "target")
            assert isinstance(caught.value.causes[0], OSError)
            assert isinstance(caught.value, OSError)
            assert not isinstance(caught.value, ValueError)
            again = pickle.loads(pickle.dumps(caught.value))
            assert (str(again), again.errno) == (str(caught.value), error)
            left = {p.name for p in tmp_path.iterdir()} - {"counted", "good"}
            if call == len(counting.made):  # all that failed is the sync of a name that everybody can see already
                assert "target is complete" in str(caught.value)
                assert verify_checkpoint(tmp_path / "target") == []
                shutil.rmtree(tmp_path / "target")
            else:
                assert left == set(), counting.made[call - 1]
    assert open_descriptors() <= fds  # another test's may be closed late
    assert threading.active_count() == threads
    save(state_at(2, 0, 1), tmp_path / "target")
    assert verify_checkpoint(tmp_path / "target") == verify_checkpoint(tmp_path / "good") == []


def test_short_and_interrupted_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    count = [0]

    def short(fd: int, data: memoryview) -> int:
        count[0] += 1
        if count[0] % 5 == 0:
            raise InterruptedError(errno.EINTR, "interrupted")
        return write(fd, data[: max(7, len(data) // 2)])

    monkeypatch.setattr(os, "write", short)
    save(state_at(4, 0, 1), tmp_path / "target")
    monkeypatch.undo()
    assert verify_checkpoint(tmp_path / "target") == []
    assert_is_step(load(state_at(0, 0, 1, filled=False), tmp_path / "target").state, 4, 0, 1)


def test_a_disk_that_accepts_nothing_is_an_error_not_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    with pytest.raises(CheckpointFailedError, match="accepts no more bytes"):
        save(state_at(1, 0, 1), tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the hint is one to Linux")
def test_the_disk_is_handed_whole_pieces_that_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = 4 << 20
    handed = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, start, size, advice: handed.append((start, size, os.fstat(fd).st_size))
    )
    store_at(tmp_path).write("values", lambda: [bytes(piece - 1), bytes(1), bytes(3 * piece + 5)])
    assert handed == [(0, piece, piece), (piece, 3 * piece, 4 * piece + 5)]
