"""Where a save writes its files, and how it commits them: the protocol, and its version for mounted file systems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from opt_checkpoint.disk.files import Files, new_file, write_all, write_files
from opt_checkpoint.disk.index import CheckpointIndex
from opt_checkpoint.disk.new_directory import NewDirectory
from opt_checkpoint.objects.path import Location


class Output(Protocol):
    """A new file that is written sequentially."""

    def append(self, data: bytes | memoryview) -> None:
        """Write bytes at the end. Their memory may not change until the file is complete."""

    def start_writeback(self, start: int, nbytes: int) -> None:
        """Start writeback of bytes that were appended, without waiting; only a hint."""


class SaveTarget(Protocol):
    """One save, from its first file to its commit.

    Every rank has one and writes to it. `begin`, `commit` and `abandon` are called on the coordinator.
    """

    @property
    def path(self) -> Location:
        """Path of the checkpoint after the commit."""

    @property
    def temporary(self) -> Location:
        """Path of the files until the commit."""

    def begin(self) -> None:
        """Create the temporary place, take a lease on it, and remove leftovers of dead saves.

        Raises:
            CheckpointExistsError: the target already exists.
            OSError: the temporary place cannot be created.
        """

    def new_file(self, name: str) -> AbstractContextManager[Output]:
        """A new file of the checkpoint, safely stored when the block ends without an error."""

    def write_files(self, contents: Mapping[str, bytes]) -> None:
        """Write and durably store new small files of the checkpoint, by name."""

    def commit(self, index: CheckpointIndex) -> None:
        """Commit the checkpoint atomically, after all its files are written.

        Raises:
            CheckpointExistsError: another save has committed in the meantime.
            CheckpointCorruptError: files are missing.
            OSError: raised by the file system or store.
        """

    def release(self) -> None:
        """Release the lease. Called by `commit` and `abandon`; may be called again."""

    def abandon(self) -> None:
        """Remove the files of a failed save, unless it may have been committed."""


class FileOutput(NamedTuple):
    """`Output` to a file descriptor."""

    files: Files
    fd: int

    def append(self, data: bytes | memoryview) -> None:
        write_all(self.files, self.fd, data)

    def start_writeback(self, start: int, nbytes: int) -> None:
        self.files.start_writeback(self.fd, start, nbytes)


class DirectoryTarget:
    """A save to a mounted file system; see `SaveTarget`.

    Args:
        path: the target, which must not exist.
        save_id: 32 hexadecimal digits that name this save.
        files: the file system.
        replace: whether a checkpoint may be at `path`, which the commit replaces.
    """

    def __init__(self, path: Path, save_id: str, files: Files, *, replace: bool = False) -> None:
        self._directory, self._files = NewDirectory(path, save_id, files, replace=replace), files

    @property
    def path(self) -> Path:
        return self._directory.path

    @property
    def temporary(self) -> Path:
        return self._directory.temporary

    def begin(self) -> None:
        self._directory.make()

    @contextmanager
    def new_file(self, name: str) -> Iterator[Output]:
        with new_file(self._files, self.temporary / name) as fd:
            yield FileOutput(self._files, fd)

    def write_files(self, contents: Mapping[str, bytes]) -> None:
        write_files(self._files, self.temporary, contents)

    def commit(self, index: CheckpointIndex) -> None:
        self._directory.commit()

    def release(self) -> None:
        self._directory.release()

    def abandon(self) -> None:
        self._directory.abandon()
