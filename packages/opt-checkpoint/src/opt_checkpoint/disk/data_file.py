"""A data file open for positional reads, checked to belong to the save that the manifest tells of."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opt_checkpoint.disk.index import CheckpointIndex
from opt_checkpoint.errors import CheckpointCorruptError

FILE_MARK = b"opt-checkpoint data 1 "


def file_header(save_id: str) -> bytes:
    """The first 64 bytes of every data file: what it is, and which save it belongs to."""
    return (FILE_MARK + save_id.encode()).ljust(63) + b"\n"


def open_regular(path: Path) -> int:
    """A descriptor of a regular file, for reading.

    A checkpoint may come from a stranger: a symbolic link would lead out of its directory, and a FIFO would wait for a
    writer.

    Raises:
        CheckpointCorruptError: something other than a regular file is there.
        OSError: it cannot be opened; FileNotFoundError where nothing is there.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link; a socket
            raise CheckpointCorruptError(f"{path} is not a regular file; it is not read") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointCorruptError(f"{path} is not a regular file; it is not read")
    return fd


def read_small_file(path: Path) -> bytes:
    """All bytes of a regular file; raises as `open_regular`."""
    with open(open_regular(path), "rb") as stream:
        return stream.read()


class DataFile:
    """One data file of a checkpoint, open for positional reads by any number of threads.

    Args:
        path: the file.
        header: what it must begin with; None for foreign files.

    Raises:
        CheckpointCorruptError: it is missing, or belongs to another save.
    """

    __slots__ = ("_fd", "bytes_read", "path")

    def __init__(self, path: Path, header: bytes | None) -> None:
        self.path, self.bytes_read = path, 0
        try:
            self._fd = open_regular(path)
        except FileNotFoundError:
            raise CheckpointCorruptError(f"data file {path} is missing") from None
        if header is not None and os.pread(self._fd, len(header), 0) != header:
            self.close()
            raise CheckpointCorruptError(f"data file {path} belongs to another save than the manifest beside it")

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)

    def read_into(self, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `start` on.

        Raises:
            CheckpointCorruptError: the file ends before.
            OSError: it cannot be read.
        """
        self.bytes_read += len(view)
        while len(view):
            count = os.preadv(self._fd, [view[: 1 << 30]], start)
            if count == 0:
                raise CheckpointCorruptError(f"data file {self.path} ends at {start}, where more was stored")
            start, view = start + count, view[count:]

    def read(self, start: int, nbytes: int) -> bytes:
        """The bytes `[start, start + nbytes)`; raises as `read_into`, before memory for them is allocated."""
        if start + nbytes > os.fstat(self._fd).st_size:
            raise CheckpointCorruptError(f"data file {self.path} ends before {start + nbytes}, where more was stored")
        buffer = bytearray(nbytes)
        self.read_into(start, memoryview(buffer))
        return bytes(buffer)


@contextmanager
def open_files(index: CheckpointIndex, names: set[str]) -> Iterator[dict[str, DataFile]]:
    """The named data files of a checkpoint, opened and checked to be of its save, for the time of the block."""
    header = None if index.save_id is None else file_header(index.save_id)
    files: dict[str, DataFile] = {}
    try:
        for name in sorted(names):
            files[name] = DataFile(index.path / name, header)
        yield files
    finally:
        for file in files.values():
            file.close()
