"""The file system behind a small protocol, so that tests can make any call fail.

Nothing else in the package writes to, renames in, or deletes from a checkpoint directory.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

DELETING = ".opt-checkpoint-deleting-"  # the names of directories that are being deleted begin with this
_RETRIES = 3


class Files(Protocol):
    """The file system operations of a save, one method per system call that can fail."""

    def make_dir(self, path: Path) -> None:
        """Create a directory in an existing parent. Raise FileExistsError if it exists."""

    def create(self, path: Path) -> int:
        """Create a new file for writing; returns a file descriptor."""

    def reopen(self, path: Path) -> int:
        """Open an existing file for writing; returns a file descriptor."""

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """Write some of `data`; returns the number of bytes written."""

    def write_at(self, fd: int, data: bytes | memoryview, position: int) -> int:
        """Overwrite bytes at `position` with some of `data`; returns the number of bytes written."""

    def start_writeback(self, fd: int, start: int, nbytes: int) -> None:
        """Start writeback of bytes that were written, without waiting; only a hint."""

    def fsync(self, fd: int) -> None:
        """Make the written bytes survive a power loss."""

    def close(self, fd: int) -> None:
        """Close the descriptor."""

    def sync_dir(self, path: Path) -> None:
        """Make the names in a directory survive a power loss."""

    def rename(self, source: Path, target: Path) -> None:
        """Move a directory. Fails if `target` exists and is not empty."""

    def remove(self, path: Path) -> None:
        """Delete a file."""

    def remove_tree(self, path: Path) -> None:
        """Delete a directory and its contents."""

    def touch(self, path: Path) -> None:
        """Set the modification time of a file to now."""


class LocalFiles:
    """`Files` of a POSIX file system, local or mounted."""

    __slots__ = ()

    def make_dir(self, path: Path) -> None:
        path.mkdir()

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def reopen(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        return os.write(fd, data)

    def write_at(self, fd: int, data: bytes | memoryview, position: int) -> int:
        return os.pwrite(fd, data, position)

    def start_writeback(self, fd: int, start: int, nbytes: int) -> None:
        if sys.platform == "linux":
            # For dirty pages, DONTNEED makes Linux start writeback; it keeps the pages until they are on disk.
            os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def sync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)

    def touch(self, path: Path) -> None:
        os.utime(path)


def write_all(files: Files, fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`, continuing after short writes.

    Raises:
        OSError: raised by the file system; EIO if it accepts no more bytes without an error.
    """
    _write_through(memoryview(data), lambda rest: files.write(fd, rest))


def write_all_at(files: Files, fd: int, data: bytes | memoryview, position: int) -> None:
    """Overwrite bytes at `position` with all of `data`, as `write_all`."""
    end = position + len(data)
    _write_through(memoryview(data), lambda rest: files.write_at(fd, rest, end - len(rest)))


def _write_through(view: memoryview, write: Callable[[memoryview], int]) -> None:
    stalled = 0
    while len(view):
        try:
            written = write(view)
        except InterruptedError:  # a signal before anything was written; some mounted file systems let it through
            continue
        stalled = 0 if written else stalled + 1
        if stalled == _RETRIES:
            raise OSError(errno.EIO, "the file system accepts no more bytes and gives no reason")
        view = view[written:]


@contextmanager
def new_file(files: Files, path: Path) -> Iterator[int]:
    """A new file, synced when the block ends without an error."""
    with _synced(files, files.create(path)) as fd:
        yield fd


@contextmanager
def shared_file(files: Files, path: Path) -> Iterator[int]:
    """A file that several ranks write. The bytes of this rank are synced when the block ends without an error."""
    with _synced(files, files.reopen(path)) as fd:
        yield fd


@contextmanager
def _synced(files: Files, fd: int) -> Iterator[int]:
    try:
        yield fd
        files.fsync(fd)
    finally:
        files.close(fd)


def write_file(files: Files, path: Path, content: bytes) -> None:
    """Write a new file, and sync it."""
    with new_file(files, path) as fd:
        write_all(files, fd, content)


def write_files(files: Files, directory: Path, contents: Mapping[str, bytes]) -> None:
    """Write and sync new files. All are written before the first sync, which often syncs all of them."""
    with ExitStack() as synced:
        for name, content in contents.items():
            write_all(files, synced.enter_context(new_file(files, directory / name)), content)


def make_parents(files: Files, path: Path) -> None:
    """Make the missing parent directories of `path`, and sync each one's name.

    Raises:
        OSError: raised by the file system.
    """
    missing = [parent for parent in path.parents if not parent.exists()]
    for parent in reversed(missing):
        try:
            files.make_dir(parent)
        except FileExistsError:  # another save made it in the meantime
            continue
        files.sync_dir(parent.parent)


def discard(files: Files, path: Path, token: str) -> None:
    """Rename a directory, then delete it, so that no reader sees a part of it under its own name."""
    renamed = path.with_name(f"{DELETING}{token}")
    files.rename(path, renamed)
    files.remove_tree(renamed)
