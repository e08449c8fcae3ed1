"""Paths in object stores, which can be used in place of `pathlib.Path`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self, TypeAlias
from urllib.parse import unquote, urlsplit

from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.objects.client import Listed, ObjectClient
from opt_checkpoint.objects.obstore_client import open_url
from opt_checkpoint.objects.retrying import RetryingClient

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.*", re.DOTALL)
_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "https", "http", "file", "memory")
_FLATTENED_URL = re.compile(rf"(?:{'|'.join(_SCHEMES)}):/[^/]")


class _NoClient:
    """Replaces the client of a path that was sent to another process."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("this ObjectPath came from another process; use `bound` before it is read")


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """An object, or a common prefix of several objects, in an object store.

    It can be used wherever this package takes the path of a checkpoint or of a series of checkpoints. Pickling drops
    the client and its credentials.

    Args:
        client: makes the requests.
        root: URL of the key "", for messages and comparisons.
        key: the key within the store, without a slash at either end.
    """

    client: ObjectClient
    root: str
    key: str = ""

    @classmethod
    def at(cls, url: str, **options: Any) -> ObjectPath:
        """The path that a URL names.

        Args:
            url: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://...`, `file:///directory`, `memory://name/prefix`.
            options: passed to `obstore.store.from_url`: `region=`, `endpoint=`, `access_key_id=`, ...,
                `credential_provider=`, `client_options=`, `retry_config=`. obstore takes missing options from the
                environment.

        Raises:
            CheckpointingException: obstore is not installed, or does not accept the URL or the options.
        """
        match = _URL.fullmatch(url)
        if match is None or match[1].lower() not in _SCHEMES:
            raise CheckpointValueError(
                f"{url!r} is not the URL of an object store; allowed: {', '.join(f'{s}://' for s in _SCHEMES)}"
            )
        opened = open_url(url, options)
        return cls(RetryingClient(opened.client), opened.root, opened.key)

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.client, self.root, f"{self.key}/{name}" if self.key else name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unbound, (self.root, self.key)

    def bound(self, other: ObjectPath) -> ObjectPath:
        """Another path in the same store, with the client of this one."""
        if other.root != self.root:
            raise RuntimeError(f"{other} is not in the store of {self}")
        return ObjectPath(self.client, self.root, other.key)

    @property
    def name(self) -> str:
        """The last part."""
        return str(self).rpartition("/")[2]

    def read_bytes(self) -> bytes:
        """Read a whole small object.

        Raises:
            FileNotFoundError: it does not exist.
            OSError: the store did not respond.
        """
        return self.client.get(self.key)

    def exists(self) -> bool:
        """Whether the object exists. Raises OSError if the store does not respond."""
        try:
            self.client.head(self.key)
        except FileNotFoundError:
            return False
        return True

    def listing(self) -> dict[str, Listed]:
        """All objects below, by the rest of their keys."""
        start = len(self.key) + 1 if self.key else 0
        return {found.key[start:]: found for found in self.client.listing(self.key)}

    def folders(self) -> list[ObjectPath]:
        """The direct children that have objects below them."""
        return [self / name for name in sorted(self.client.folders(self.key))]

    def delete(self, names: list[str]) -> None:
        """Delete direct children by name; missing ones are ignored."""
        self.client.delete([(self / name).key for name in names])

    def absolute(self) -> Self:
        """Return this path."""
        return self


def _unbound(root: str, key: str) -> ObjectPath:
    return ObjectPath(_NoClient(), root, key)


Location: TypeAlias = Path | ObjectPath
AnyPath: TypeAlias = str | os.PathLike[str] | ObjectPath


def location_of(path: AnyPath) -> Location:
    """A path or `file://` URL as an absolute `Path`, any other URL as an `ObjectPath` with options of the environment.

    Raises:
        CheckpointingException: a URL cannot be opened, or was passed as a `pathlib.Path`.
    """
    if isinstance(path, ObjectPath):
        return path
    text = os.fspath(path)
    if text.lower().startswith("file://"):
        return _of_file_url(text)
    if _URL.fullmatch(text):
        return ObjectPath.at(text)
    if _FLATTENED_URL.match(text):
        raise CheckpointValueError(f"{text!r} was a URL before pathlib dropped a slash; pass the URL as a str")
    return Path(text).absolute()


def _of_file_url(url: str) -> Path:
    """The directory that a `file://` URL names: it is saved to as a path is, with every sync."""
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise CheckpointValueError(f"{url} names a host; write file:///absolute/path")
    if parts.query or parts.fragment:
        raise CheckpointValueError(f"{url} has a query or fragment; write ? as %3F and # as %23")
    return Path(unquote(parts.path))


def local_path(path: AnyPath, what: str) -> Path:
    """Return an absolute path in a mounted file system.

    Args:
        path: a path.
        what: what the path is for, used in the message.

    Raises:
        CheckpointingException: it is the URL of an object store.
    """
    text = str(path) if isinstance(path, ObjectPath) else os.fspath(path)
    if text.lower().startswith("file://") and not isinstance(path, ObjectPath):
        return _of_file_url(text)
    if isinstance(path, ObjectPath) or _URL.fullmatch(text) or _FLATTENED_URL.match(text):
        raise CheckpointValueError(f"{text} is in an object store; {what} must be in a mounted file system")
    return Path(text).absolute()


def subdirectories(directory: Location) -> Sequence[Location]:
    """List the subdirectories of a directory, sorted; empty if the directory does not exist.

    Raises:
        OSError: the directory cannot be read.
    """
    if isinstance(directory, ObjectPath):
        return directory.folders()
    try:
        return sorted(entry for entry in directory.iterdir() if entry.is_dir())
    except FileNotFoundError:
        return []
