"""File systems that fail: at the k-th call, with a given error, by death, by short writes, or by loss of power."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from opt_checkpoint.disk.files import LocalFiles


class CountingFiles(LocalFiles):
    """Counts calls, and does `at_call(number, name)` before each."""

    def __init__(self, at_call: Callable[[int, str], None] = lambda number, name: None) -> None:
        self.calls: list[str] = []
        self._at_call = at_call

    def _before(self, name: str) -> None:
        self.calls.append(name)
        self._at_call(len(self.calls), name)

    def make_dir(self, path: Path) -> None:
        self._before("make_dir")
        super().make_dir(path)

    def create(self, path: Path) -> int:
        self._before("create")
        return super().create(path)

    def reopen(self, path: Path) -> int:
        self._before("reopen")
        return super().reopen(path)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self._before("write")
        return super().write(fd, data)

    def write_at(self, fd: int, data: bytes | memoryview, position: int) -> int:
        self._before("write_at")
        return super().write_at(fd, data, position)

    def fsync(self, fd: int) -> None:
        self._before("fsync")
        super().fsync(fd)

    def sync_dir(self, path: Path) -> None:
        self._before("sync_dir")
        super().sync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._before("rename")
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self._before("remove")
        super().remove(path)

    def remove_tree(self, path: Path) -> None:
        self._before("remove_tree")
        super().remove_tree(path)


def dying_at(call: int) -> CountingFiles:
    """Kills this process, for real, before the given call."""

    def die(number: int, name: str) -> None:
        if number == call:
            os.kill(os.getpid(), signal.SIGKILL)

    return CountingFiles(die)


def failing_at(call: int, error: int) -> CountingFiles:
    """Raises an OSError once, at the given call."""

    def fail(number: int, name: str) -> None:
        if number == call:
            raise OSError(error, os.strerror(error))

    return CountingFiles(fail)


class ShortWrites(LocalFiles):
    """Writes at most seven bytes at a time beyond the first thousand, and is interrupted now and then."""

    def __init__(self) -> None:
        self._count = 0

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self._count += 1
        if self._count % 5 == 0:
            raise InterruptedError(errno.EINTR, "interrupted")
        return super().write(fd, memoryview(data)[: max(7, len(data) // 2)])

    def write_at(self, fd: int, data: bytes | memoryview, position: int) -> int:
        return super().write_at(fd, memoryview(data)[:7], position)


class PowerLoss(BaseException):
    """The machine goes dark."""


class LossyFiles(CountingFiles):
    """Forgets, when the power goes at call `k`, what was not synced: file contents, and names in directories.

    `after_loss` turns the real directory into what a disk may hold then. A rename that was not synced may have reached
    the disk or not: `rename_lasts` says which.
    """

    def __init__(self, call: int, *, rename_lasts: bool) -> None:
        super().__init__(self._maybe_lose)
        self._call, self._rename_lasts = call, rename_lasts
        self._paths: dict[int, Path] = {}
        self._unsynced_content: set[Path] = set()
        self._unsynced_names: set[Path] = set()
        self._renames: list[tuple[Path, Path]] = []

    def _maybe_lose(self, number: int, name: str) -> None:
        if number >= self._call:
            raise PowerLoss

    def make_dir(self, path: Path) -> None:
        super().make_dir(path)
        self._unsynced_names.add(path)

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._paths[fd] = path
        self._unsynced_content.add(path)
        self._unsynced_names.add(path)
        return fd

    def reopen(self, path: Path) -> int:
        fd = super().reopen(path)
        self._paths[fd] = path
        return fd

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self._unsynced_content.add(self._paths[fd])
        return super().write(fd, data)

    def write_at(self, fd: int, data: bytes | memoryview, position: int) -> int:
        self._unsynced_content.add(self._paths[fd])
        return super().write_at(fd, data, position)

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self._unsynced_content.discard(self._paths[fd])

    def sync_dir(self, path: Path) -> None:
        super().sync_dir(path)
        self._unsynced_names = {p for p in self._unsynced_names if p.parent != path}
        self._renames = [(a, b) for a, b in self._renames if b.parent != path]

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._renames.append((source, target))
        moved = {
            p: target / p.relative_to(source)
            for p in self._unsynced_content | self._unsynced_names
            if source in p.parents
        }
        self._unsynced_content = {moved.get(p, p) for p in self._unsynced_content}
        self._unsynced_names = {moved.get(p, p) for p in self._unsynced_names} - {source}

    def after_loss(self) -> None:
        """Make the directory what the disk holds."""
        for path in self._unsynced_content:
            if path.exists():
                os.truncate(path, 0)
        for path in self._unsynced_names:
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
        if not self._rename_lasts:
            for source, target in reversed(self._renames):
                if target.exists():
                    target.rename(source)
