"""The requests to an object store as a protocol, so that tests can make any of them fail.

Errors are `OSError`s: `FileNotFoundError` if an object is known to be absent, `FileExistsError` if `create` found one,
`PermissionError`, `TimeoutError`, and `OSError` with `EIO` for everything else. Other errors never mean that an object
is absent.
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
        """Write a small object, replacing an existing one."""

    def create(self, key: str, content: bytes) -> None:
        """Write a small object. Raises FileExistsError if it exists, even if an earlier attempt of this call wrote
        it."""

    def upload(self, key: str, parts: Iterable[bytes | memoryview]) -> None:
        """Write an object in parts, as the iterator yields them. The object appears only after all parts; if the
        iterator raises, so does this, and no object appears."""

    def get(self, key: str) -> bytes:
        """Read a whole small object."""

    def get_spans(self, key: str, spans: Sequence[ByteSpan]) -> list[memoryview]:
        """Read several runs of bytes of an object concurrently. A run that reaches beyond the end of the object is
        truncated, or raises OSError."""

    def head(self, key: str) -> Listed:
        """Size and time of an object."""

    def listing(self, prefix: str) -> list[Listed]:
        """All objects whose keys begin with `prefix` and a slash; all objects for an empty one."""

    def folders(self, prefix: str) -> list[str]:
        """The distinct next parts of keys below `prefix` that have further parts, like subdirectories."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Missing ones are ignored."""
