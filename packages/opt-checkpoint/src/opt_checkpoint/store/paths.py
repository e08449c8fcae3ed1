"""Paths of checkpoints: directories as `pathlib.Path`, places in object stores as `ObjectPath`."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

from opt_checkpoint.errors import CheckpointValueError

with suppress(ImportError):  # an extra
    from obstore import exceptions
    from obstore.store import MemoryStore, from_url

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.*", re.DOTALL)
_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "https", "http", "memory")
_ANY_URL = re.compile(rf"{_URL.pattern}|(?:{'|'.join(_SCHEMES)}):/", re.DOTALL)
_FLATTENED_URL = re.compile(rf"(?:{'|'.join((*_SCHEMES, 'file'))}):/[^/]")


def _has_obstore() -> bool:
    return "from_url" in globals()


@cache
def _memory_store(name: str) -> Any:
    """The in-memory store of this name."""
    return MemoryStore()


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """An object, or a common prefix of several objects, in an object store.

    It can be used wherever this package takes the path of a checkpoint or of a series of checkpoints. Pickling drops
    the credentials: a path from another process names a place, but cannot be read.

    Args:
        root: URL of the key "", for messages and comparisons.
        key: the key within the store, without a slash at either end.
        store: an obstore store; its keys are separated by slashes and begin without one.
    """

    root: str
    key: str
    store: Any

    @classmethod
    def at(cls, url: str, **options: Any) -> ObjectPath:
        """Return the path that a URL names.

        Args:
            url: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://...`; `memory://name/prefix` for a store in this
                process, shared by all URLs with this name.
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
        if not _has_obstore():
            raise CheckpointValueError(
                "checkpoints in object stores need obstore, which cannot be imported: python -m pip install obstore"
            )
        parts = urlsplit(url)
        root = url.rstrip("/")
        if parts.query or parts.fragment:
            raise CheckpointValueError(f"{url} has a query or fragment; pass options as arguments of ObjectPath.at")
        if parts.scheme == "memory":
            if options:
                raise CheckpointValueError(f"{url} takes no options; given: {', '.join(sorted(options))}")
            return cls(f"memory://{parts.netloc}", unquote(parts.path).strip("/"), _memory_store(parts.netloc))
        try:
            return cls(root, "", from_url(root, **options))
        except (exceptions.BaseError, TypeError, ValueError) as error:
            first_line = str(error).partition("\n")[0]
            raise CheckpointValueError(f"{url} cannot be opened: {first_line}") from error

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.root, f"{self.key}/{name}" if self.key else name, self.store)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectPath, (self.root, self.key, None)

    @property
    def name(self) -> str:
        """The last part."""
        return str(self).rpartition("/")[2]


Location: TypeAlias = Path | ObjectPath
AnyPath: TypeAlias = str | os.PathLike[str] | ObjectPath


def location_of(path: AnyPath) -> Location:
    """Return a path or `file://` URL as an absolute `Path`, any other URL as an `ObjectPath` with options of the
    environment.

    Raises:
        CheckpointingException: a URL cannot be opened, or was passed as a `pathlib.Path`.
    """
    if isinstance(path, ObjectPath):
        return path
    text = os.fspath(path)
    if text.lower().startswith("file://"):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise CheckpointValueError(f"{text} names a host; write file:///absolute/path")
        if parts.query or parts.fragment:
            raise CheckpointValueError(f"{text} has a query or fragment; write ? as %3F and # as %23")
        return Path(unquote(parts.path)).absolute()
    if _URL.fullmatch(text):
        return ObjectPath.at(text)
    if _FLATTENED_URL.match(text):
        raise CheckpointValueError(f"{text!r} was a URL before pathlib dropped a slash; pass the URL as a str")
    return Path(text).absolute()


def local_path(path: AnyPath, what: str) -> Path:
    """Return an absolute path in a mounted file system.

    Args:
        path: a path.
        what: what the path is for, used in the message.

    Raises:
        CheckpointingException: it is the URL of an object store.
    """
    text = str(path)
    if isinstance(path, ObjectPath) or (not text.lower().startswith("file://") and _ANY_URL.match(text)):
        raise CheckpointValueError(f"{text} is in an object store; {what} must be in a mounted file system")
    place = location_of(path)
    assert isinstance(place, Path)
    return place


def reached_from(source: Location, place: Location) -> Location:
    """Return a place that rank 0 has opened below `source`, with this rank's own credentials."""
    if isinstance(source, ObjectPath) and isinstance(place, ObjectPath):
        return ObjectPath(source.root, place.key, source.store)
    return place
