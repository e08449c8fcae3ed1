"""Writes one data file in order, while a second thread computes checksums.

Nothing that was written is changed later: the checksums of large items go to the manifest, and their archives have
the checksum 0, which torch never compares. With a spare core, hashing therefore costs no time. Writeback to the disk
starts every few megabytes, not after the last byte.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from opt_checkpoint.disk.checksums import PieceSums, crc32, crc32_combine, pieces
from opt_checkpoint.disk.hasher import Hasher
from opt_checkpoint.disk.index import StoredFile
from opt_checkpoint.disk.save_target import Output

_BUFFER_BYTES = 4 << 20
_WRITEBACK_BYTES = 4 << 20  # also the granularity, so that a page that is still filled is not written twice


class ItemSums(NamedTuple):
    """The checksums of an item's values; complete once `last` is done."""

    sums: PieceSums
    last: Future[None] | None = None

    def settled(self) -> PieceSums:
        """Wait for the checksums and return them."""
        if self.last is not None:
            self.last.result()
        return self.sums


class _Part(NamedTuple):
    """A run of the file and its checksum."""

    crc: int | ItemSums
    nbytes: int


@dataclass(slots=True, kw_only=True)
class DataFileWriter:
    """A file being written.

    Args:
        output: the file, open for writing.
        hasher: hashes large items.
        position: bytes put so far.
    """

    output: Output
    hasher: Hasher
    position: int = 0
    _parts: list[_Part] = field(default_factory=list)
    _gathered: bytearray = field(default_factory=bytearray)
    _written: int = 0
    _sent: int = 0

    def put(self, data: bytes | memoryview) -> None:
        """Append a few bytes, buffered into larger writes."""
        self._gathered += data
        self.position += len(data)
        if len(self._gathered) >= _BUFFER_BYTES:
            self.flush()

    def put_large(self, view: memoryview, sums: PieceSums) -> Future[None]:
        """Append many bytes without a copy, and add them to `sums` in the background.

        The memory may not change until the future is done.
        """
        self.flush()
        done: Future[None] | None = None
        for piece in pieces(view):
            done = self.hasher.submit(piece, sums)
            self._write(piece)
        if done is None:
            raise ValueError("put_large was given no bytes")
        self.position += len(view)
        return done

    def end_large(self, item: ItemSums, nbytes: int) -> None:
        """Record the bytes that `put_large` has written since the last flush as one part with the checksums `item`."""
        self._parts.append(_Part(item, nbytes))

    def flush(self) -> None:
        """Write the buffered bytes."""
        if self._gathered:
            view = memoryview(bytes(self._gathered))
            self._gathered.clear()
            self._parts.append(_Part(crc32(view), len(view)))
            self._write(view)

    def _write(self, data: bytes | memoryview) -> None:
        """Append to the file, and start writeback of each completed `_WRITEBACK_BYTES`."""
        self.output.append(data)
        self._written += len(data)
        if ready := (self._written - self._sent) // _WRITEBACK_BYTES * _WRITEBACK_BYTES:
            self.output.start_writeback(self._sent, ready)
            self._sent += ready

    def finish(self) -> StoredFile:
        """Write the buffered bytes; return size and CRC-32 of the file. The caller syncs it."""
        self.flush()
        total = 0
        for part in self._parts:
            crc = part.crc if isinstance(part.crc, int) else part.crc.settled().whole
            total = crc32_combine(total, crc, part.nbytes)
        return StoredFile(size=self.position, crc=total)
