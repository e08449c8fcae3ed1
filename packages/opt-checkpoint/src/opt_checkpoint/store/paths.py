"""Paths of checkpoints: directories as `pathlib.Path`, places in object stores as `ObjectPath`, and requests to these.

Requests are made with obstore: to S3, Google Cloud Storage, Azure and memory. Their errors are `OSError`s:
`FileNotFoundError` if an object is known to be absent, `FileExistsError` if `create` found one, `PermissionError`, and
`OSError` with `EIO` for everything else. Other errors never mean that an object is absent.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.store.calls import call

try:
    import obstore
    from obstore import exceptions
    from obstore.store import MemoryStore, from_url
except ImportError:  # an extra
    _INSTALLED = False
else:
    _INSTALLED = True

T = TypeVar("T")
_PART_BYTES = 32 << 20  # S3 allows 10,000 parts: files of up to 320 GB
_PARTS_AT_ONCE = 8
_COALESCED_BYTES = 1 << 20  # gap in bytes up to which two ranges are fetched by one request
_ATTEMPTS, _FIRST_WAIT_S = 3, 0.5
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.*", re.DOTALL)
_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "https", "http", "memory")
_ANY_URL = re.compile(rf"{_URL.pattern}|(?:{'|'.join(_SCHEMES)}):/", re.DOTALL)
_FLATTENED_URL = re.compile(rf"(?:{'|'.join((*_SCHEMES, 'file'))}):/[^/]")


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


class Requests:
    """Requests to one bucket or container, each made up to three times.

    Args:
        store: an obstore store. Keys are separated by slashes and begin without one.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, content: bytes) -> None:
        """Write a small object, replacing an existing one."""
        self._make("put", key, lambda: obstore.put(self._store, key, content, use_multipart=False))

    def create(self, key: str, content: bytes) -> None:
        """Write a small object. Raises FileExistsError if it exists, even if an earlier attempt of this call wrote
        it."""
        self._make("create", key, lambda: obstore.put(self._store, key, content, mode="create"))

    def upload(self, key: str, parts: Callable[[], Iterable[bytes | memoryview]]) -> None:
        """Write an object from parts, which are read again from the first one after a failure.

        The object appears only after all parts. If reading them raises, so does this, and no object appears.
        """
        failures: list[BaseException] = []

        def read() -> Iterator[bytes | memoryview]:
            try:
                yield from (part for part in parts() if len(part))
            except GeneratorExit:  # obstore has given up; it raises its own error
                raise
            except BaseException as error:
                failures.append(error)
                raise

        def send() -> None:
            try:
                obstore.put(
                    self._store, key, read(), use_multipart=True, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE
                )
            except BaseException:
                if failures:  # else obstore would raise it as its own
                    raise failures.pop() from None
                raise

        self._make("upload", key, send)

    def get(self, key: str) -> bytes:
        """Read a whole small object."""
        return self._make("get", key, lambda: bytes(obstore.get(self._store, key).bytes()))

    def get_ranges(self, key: str, starts: Sequence[int], ends: Sequence[int]) -> list[Any]:
        """Read ranges `[start, end)` of an object concurrently. A range that reaches beyond the end of the object is
        truncated, or raises OSError."""
        ranges = ",".join(f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
        return self._make(
            "get_ranges",
            key,
            lambda: list(obstore.get_ranges(self._store, key, starts=starts, ends=ends, coalesce=_COALESCED_BYTES)),
            ranges,
        )

    def head(self, key: str) -> Listed:
        """Size and time of an object."""
        return self._make("head", key, lambda: _listed(obstore.head(self._store, key)))

    def listing(self, prefix: str) -> list[Listed]:
        """All objects whose keys begin with `prefix` and a slash; all objects for an empty one."""
        pages = lambda: [_listed(meta) for page in obstore.list(self._store, prefix or None) for meta in page]
        return self._make("listing", prefix, pages)

    def folders(self, prefix: str) -> list[str]:
        """The distinct next parts of keys below `prefix` that have further parts, sorted, like subdirectories."""

        def names() -> list[str]:
            found = obstore.list_with_delimiter(self._store, prefix or None)["common_prefixes"]
            return sorted(folder.rstrip("/").rpartition("/")[2] for folder in found)

        return self._make("folders", prefix, names)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, many by one request where the store can. Missing ones are ignored."""
        if not keys:
            return
        try:
            self._make("delete", ",".join(keys), lambda: obstore.delete(self._store, list(keys)))
        except FileNotFoundError:  # some stores report absent objects, and may not have deleted the others
            if len(keys) > 1:
                for key in keys:
                    self.delete([key])

    def _make(self, name: str, key: str, act: Callable[[], T], detail: str = "") -> T:
        """Make a request up to three times, with a pause after each failure.

        obstore retries single HTTP requests. This also repeats what obstore must not repeat: a `create` without a
        response, after which `FileExistsError` may mean that the first attempt wrote the object, and an upload from its
        start.
        """

        def once() -> T:
            try:
                return act()
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:  # the second: some `create`s
                raise FileExistsError(errno.EEXIST, "the object exists", key) from error
            except exceptions.NotFoundError as error:
                raise FileNotFoundError(errno.ENOENT, "there is no such object", key) from error
            except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
                raise PermissionError(errno.EACCES, f"the object store refused: {_first_line(error)}", key) from error
            except exceptions.BaseError as error:
                raise OSError(errno.EIO, f"the object store failed: {_first_line(error)}", key) from error

        for attempt in range(_ATTEMPTS - 1):
            try:
                return call(name, key, once, detail)
            except (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError):  # valid responses
                raise
            except OSError:
                time.sleep(_FIRST_WAIT_S * 2**attempt * random.uniform(0.5, 1.5))
        return call(name, key, once, detail)


def _listed(meta: Any) -> Listed:
    return Listed(meta["path"], meta["size"], meta["last_modified"])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


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
        requests: makes the requests.
    """

    root: str
    key: str
    requests: Requests | None

    @classmethod
    def at(cls, url: str, **options: Any) -> ObjectPath:
        """The path that a URL names.

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
        if not _INSTALLED:
            raise CheckpointValueError(
                "checkpoints in object stores need obstore, which is not installed: python -m pip install obstore"
            )
        parts, root = urlsplit(url), url.rstrip("/")
        if parts.query or parts.fragment:
            raise CheckpointValueError(f"{url} has a query or fragment; pass options as arguments of ObjectPath.at")
        if parts.scheme == "memory":
            if options:
                raise CheckpointValueError(f"{url} takes no options; given: {', '.join(sorted(options))}")
            store = _memory_store(parts.netloc)
            return cls(f"memory://{parts.netloc}", unquote(parts.path).strip("/"), Requests(store))
        try:
            return cls(root, "", Requests(from_url(root, **options)))
        except (exceptions.BaseError, TypeError, ValueError) as error:
            raise CheckpointValueError(f"{url} cannot be opened: {_first_line(error)}") from error

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.root, f"{self.key}/{name}" if self.key else name, self.requests)

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
    """A path or `file://` URL as an absolute `Path`, any other URL as an `ObjectPath` with options of the environment.

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
    """A place that rank 0 has opened below `source`, with this rank's own credentials."""
    if isinstance(source, ObjectPath) and isinstance(place, ObjectPath):
        return ObjectPath(source.root, place.key, source.requests)
    return place


def folder_beside(location: Location) -> Path | None:
    """The local directory that a path is in; None for a place in an object store."""
    return location.parent if isinstance(location, Path) else None
