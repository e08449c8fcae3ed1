"""The few requests made of an object store, as one protocol, so that tests can make any of them fail.

Errors are `OSError`s: `FileNotFoundError` where an object is known to be absent, `FileExistsError` where `create` found
one, `PermissionError`, `TimeoutError`, and `OSError` with `EIO` for everything else. An error is never an absence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol


class Listed(NamedTuple):
    """An object in a listing.

    Args:
        key: its name in the store.
        size: in bytes.
        modified: when it was written, by the clock of the store.
    """

    key: str
    size: int
    modified: datetime


class ByteSpan(NamedTuple):
    """Bytes `[start, end)` of an object."""

    start: int
    end: int


class ObjectClient(Protocol):
    """Requests to one bucket or container. Keys are separated by slashes and begin without one."""

    def put(self, key: str, content: bytes) -> None:
        """Write a small object, in place of what is there."""

    def create(self, key: str, content: bytes) -> None:
        """Write a small object. FileExistsError where there is one, also where an earlier attempt of this call wrote
        it."""

    def upload(self, key: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write an object in parts, as they come; it appears only when all are there. The iterator's errors are raised,
        and then nothing appears."""

    def get(self, key: str) -> bytes:
        """All of a small object."""

    def get_spans(self, key: str, spans: Sequence[ByteSpan]) -> list[memoryview]:
        """Several runs of bytes of an object, requested at the same time. A run that reaches beyond the object's end
        comes back shorter, or is an OSError."""

    def head(self, key: str) -> Listed:
        """Size and time of an object."""

    def listing(self, prefix: str) -> list[Listed]:
        """All objects whose keys begin with `prefix` and a slash; all objects for an empty one."""

    def folders(self, prefix: str) -> list[str]:
        """The distinct next parts of such keys that have further parts."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are absent do not matter."""
