"""Data files in object stores: ranged reads, several in flight."""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.objects.client import ByteSpan
from opt_checkpoint.objects.path import ObjectPath

_REQUEST_BYTES = 8 << 20  # a longer read is several requests at the same time
_AT_ONCE_BYTES = 8 * _REQUEST_BYTES


class ReadSizes(NamedTuple):
    """Efficient sizes of reads for a kind of file.

    Args:
        near_bytes: reading up to this many unneeded bytes costs less than another read.
        at_once_bytes: number of bytes per call for large reads.
    """

    near_bytes: int
    at_once_bytes: int


class ObjectDataFile:
    """A data file in an object store; see `DataFile`.

    Args:
        path: the object.
        header: what it must begin with; None for foreign files.
    """

    __slots__ = ("_header", "_lock", "bytes_read", "path")
    read_sizes = ReadSizes(near_bytes=1 << 20, at_once_bytes=_AT_ONCE_BYTES)

    def __init__(self, path: ObjectPath, header: bytes | None) -> None:
        self.path, self._header = path, header
        self.bytes_read = 0
        self._lock = Lock()

    def read_into(self, start: int, view: memoryview) -> None:
        self.check_header()
        self.bytes_read += len(view)
        for first in range(0, len(view), _AT_ONCE_BYTES):
            self._fetch(start + first, view[first:][:_AT_ONCE_BYTES])

    def read(self, start: int, nbytes: int) -> bytes:
        if nbytes > _AT_ONCE_BYTES and start + nbytes > self._size():
            raise self._too_short(start + nbytes)
        buffer = bytearray(nbytes)
        self.read_into(start, memoryview(buffer))
        return bytes(buffer)

    def check_header(self) -> None:
        with self._lock:
            if self._header is None:
                return
            found = self._spans([ByteSpan(0, len(self._header))])[0]
            if bytes(found) != self._header:
                raise CheckpointCorruptError(f"data file {self.path} belongs to a different save than the manifest")
            self._header = None  # the header was compared

    def _fetch(self, start: int, view: memoryview) -> None:
        """One read of up to `_AT_ONCE_BYTES`, as requests of `_REQUEST_BYTES`."""
        parts = range(0, len(view), _REQUEST_BYTES)
        ends = [min(first + _REQUEST_BYTES, len(view)) for first in parts]
        found = self._spans([ByteSpan(start + first, start + end) for first, end in zip(parts, ends, strict=True)])
        for first, end, part in zip(parts, ends, found, strict=True):
            if len(part) != end - first:
                raise self._too_short(start + end)
            view[first:end] = part

    def _spans(self, spans: list[ByteSpan]) -> list[memoryview]:
        try:
            return self.path.client.get_spans(self.path.key, spans)
        except FileNotFoundError:
            raise CheckpointCorruptError(f"data file {self.path} is missing") from None
        except OSError as error:
            if self._size() < max(span.end for span in spans):
                raise self._too_short(max(span.end for span in spans)) from error
            raise

    def _size(self) -> int:
        try:
            return self.path.client.head(self.path.key).size
        except FileNotFoundError:
            raise CheckpointCorruptError(f"data file {self.path} is missing") from None

    def _too_short(self, end: int) -> CheckpointCorruptError:
        return CheckpointCorruptError(f"data file {self.path} ends before {end}, where more was stored")
