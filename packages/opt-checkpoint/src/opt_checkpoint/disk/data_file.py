"""Positional reads of data files, which are checked to belong to the save that the manifest describes."""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Protocol

from opt_checkpoint.disk.index import CheckpointIndex, Kind
from opt_checkpoint.disk.object_data_file import ObjectDataFile, ReadSizes
from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.objects.path import Location, ObjectPath

FILE_MARK = b"opt-checkpoint data 1 "


def file_header(save_id: str) -> bytes:
    """The first 64 bytes of every data file: the file type, and the save it belongs to."""
    return (FILE_MARK + save_id.encode()).ljust(63) + b"\n"


def open_regular(path: Path, *, follow: bool = False) -> int:
    """Open a regular file for reading; returns a descriptor.

    A checkpoint may be untrusted: a symbolic link would lead out of its directory, and opening a FIFO would block.

    Args:
        path: the file.
        follow: whether it may be a symbolic link, as the files in Hugging Face's cache are.

    Raises:
        CheckpointCorruptError: something other than a regular file is there.
        OSError: it cannot be opened; FileNotFoundError if it does not exist.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link; a socket
            raise CheckpointCorruptError(f"{path} is not a regular file; it is not read") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointCorruptError(f"{path} is not a regular file; it is not read")
    return fd


def read_small_file(path: Location, *, follow: bool = False) -> bytes:
    """All bytes of a regular file or an object; takes `follow` and raises like `open_regular`."""
    if isinstance(path, ObjectPath):
        return path.read_bytes()
    with open(open_regular(path, follow=follow), "rb") as stream:
        return stream.read()


class DataFile(Protocol):
    """One data file of a checkpoint, for positional reads by any number of threads."""

    bytes_read: int

    @property
    def path(self) -> Location:
        """The path of the file."""

    @property
    def read_sizes(self) -> ReadSizes:
        """Efficient sizes of reads."""

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `start` on.

        Raises:
            CheckpointCorruptError: the file is missing, belongs to another save, or ends before.
            OSError: it cannot be read.
        """

    def read(self, start: int, nbytes: int) -> bytes:
        """The bytes `[start, start + nbytes)`; raises like `read_into`, before memory for them is allocated."""

    def check_header(self) -> None:
        """Raise like `read_into` if the file is missing or belongs to another save."""


class LocalDataFile:
    """A data file of a mounted file system; it is opened when first read.

    Args:
        path: the file.
        header: what it must begin with; None for foreign files.
        files: closes the file again when many others are open.
    """

    __slots__ = ("_files", "_header", "bytes_read", "fd", "path", "readers")
    read_sizes = ReadSizes(near_bytes=16 << 10, at_once_bytes=4 << 20)  # fits the processor's cache

    def __init__(self, path: Path, header: bytes | None, files: DataFiles) -> None:
        self.path, self._header, self._files = path, header, files
        self.bytes_read, self.readers = 0, 0
        self.fd: int | None = None

    def open(self) -> int:
        """Open the file and check that it belongs to this save; return a descriptor.

        Raises:
            CheckpointCorruptError: it is missing, or belongs to another save.
            OSError: it cannot be opened.
        """
        try:
            fd = open_regular(self.path, follow=self._files.follow)
        except FileNotFoundError:
            raise CheckpointCorruptError(
                f"data file {self.path} is missing; save checkpoints to storage that all ranks can read"
            ) from None
        try:
            if self._header is not None and os.pread(fd, len(self._header), 0) != self._header:
                raise CheckpointCorruptError(f"data file {self.path} belongs to a different save than the manifest")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read_into(self, start: int, view: memoryview) -> None:
        with self._files.reading(self) as fd:
            self.bytes_read += len(view)
            while len(view):
                count = os.preadv(fd, [view[: 1 << 30]], start)
                if count == 0:
                    raise CheckpointCorruptError(f"data file {self.path} is truncated: it ends at byte {start}")
                start, view = start + count, view[count:]

    def check_header(self) -> None:
        os.close(self.open())

    def read(self, start: int, nbytes: int) -> bytes:
        with self._files.reading(self) as fd:
            if start + nbytes > os.fstat(fd).st_size:
                raise CheckpointCorruptError(
                    f"data file {self.path} is truncated: it ends before byte {start + nbytes}"
                )
        buffer = bytearray(nbytes)
        self.read_into(start, memoryview(buffer))
        return bytes(buffer)


class DataFiles:
    """The data files of a checkpoint. Each is opened on its first read; at most about `limit` are open at a time.

    Args:
        index: the checkpoint.
        limit: number of files to keep open; a checkpoint of a thousand ranks has a thousand files.
    """

    def __init__(self, index: CheckpointIndex, limit: int = 64) -> None:
        self._index, self._limit = index, limit
        self.follow = index.kind is Kind.SAFETENSORS
        self._header = None if index.save_id is None else file_header(index.save_id)
        self._files: dict[str, DataFile] = {}
        self._open: OrderedDict[str, LocalDataFile] = OrderedDict()  # least recently read first
        self._lock = Lock()

    def __enter__(self) -> DataFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            for file in self._open.values():
                _close(file)
            self._open.clear()

    def __getitem__(self, name: str) -> DataFile:
        with self._lock:
            if name not in self._files:
                self._files[name] = self._new(self._index.path / name)
            return self._files[name]

    def _new(self, path: Location) -> DataFile:
        if isinstance(path, ObjectPath):
            return ObjectDataFile(path, self._header)
        return LocalDataFile(path, self._header, self)

    @property
    def bytes_read(self) -> int:
        """Bytes read from all files so far."""
        return sum(file.bytes_read for file in self._files.values())

    @contextmanager
    def reading(self, file: LocalDataFile) -> Iterator[int]:
        """The descriptor of a file, which stays open during the block."""
        with self._lock:
            if file.fd is None:
                self._make_room()
                file.fd = file.open()
                self._open[file.path.name] = file
            self._open.move_to_end(file.path.name)
            file.readers += 1
        try:
            yield file.fd
        finally:
            with self._lock:
                file.readers -= 1

    def _make_room(self) -> None:
        idle = [file for file in self._open.values() if not file.readers]
        for file in idle[: max(0, len(self._open) + 1 - self._limit)]:
            del self._open[file.path.name]
            _close(file)


def _close(file: LocalDataFile) -> None:
    if file.fd is not None:
        os.close(file.fd)
        file.fd = None
