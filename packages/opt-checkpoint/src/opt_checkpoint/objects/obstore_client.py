"""`ObjectClient` with obstore: S3, Google Cloud Storage, Azure, directories and memory."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.objects.client import ByteSpan, Listed

try:
    import obstore
    from obstore import exceptions
    from obstore.store import LocalStore, MemoryStore, from_url
except ImportError:  # an extra
    _INSTALLED = False
else:
    _INSTALLED = True

_PART_BYTES = 32 << 20  # S3 allows 10,000 parts: files of up to 320 GB
_PARTS_AT_ONCE = 8
_COALESCED_BYTES = 1 << 20  # gap in bytes up to which two runs are fetched by one request


class ObstoreClient:
    """Makes requests with obstore, which retries each one according to its `retry_config`.

    Args:
        store: an obstore store.
    """

    def __init__(self, store: Any) -> None:
        _require_obstore()
        self._store = store

    def put(self, key: str, content: bytes) -> None:
        with _as_os_errors(key):
            obstore.put(self._store, key, content, use_multipart=False)

    def create(self, key: str, content: bytes) -> None:
        with _as_os_errors(key):
            obstore.put(self._store, key, content, mode="create")

    def upload(self, key: str, parts: Iterable[bytes | memoryview]) -> None:
        with _as_os_errors(key):
            obstore.put(
                self._store,
                key,
                iter(parts),
                use_multipart=True,
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )

    def get(self, key: str) -> bytes:
        with _as_os_errors(key):
            return bytes(obstore.get(self._store, key).bytes())

    def get_spans(self, key: str, spans: Sequence[ByteSpan]) -> list[memoryview]:
        starts, ends = [span.start for span in spans], [span.end for span in spans]
        with _as_os_errors(key):
            found = obstore.get_ranges(self._store, key, starts=starts, ends=ends, coalesce=_COALESCED_BYTES)
        return [memoryview(part) for part in found]

    def head(self, key: str) -> Listed:
        with _as_os_errors(key):
            return _listed(obstore.head(self._store, key))

    def listing(self, prefix: str) -> list[Listed]:
        with _as_os_errors(prefix):
            pages = obstore.list(self._store, prefix or None)
            return [_listed(meta) for page in pages for meta in page]

    def folders(self, prefix: str) -> list[str]:
        with _as_os_errors(prefix):
            found = obstore.list_with_delimiter(self._store, prefix or None)["common_prefixes"]
        return [folder.rstrip("/").rpartition("/")[2] for folder in found]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:  # one request each: stores differ in bulk deletes, and in their response for absent objects
            try:
                with _as_os_errors(key):
                    obstore.delete(self._store, key)
            except FileNotFoundError:
                continue


def _listed(meta: Any) -> Listed:
    return Listed(meta["path"], meta["size"], meta["last_modified"])


@contextmanager
def _as_os_errors(key: str) -> Iterator[None]:
    """Raise obstore's exceptions as `OSError`s, in one line each."""
    try:
        yield
    except exceptions.AlreadyExistsError as error:
        raise FileExistsError(errno.EEXIST, "the object exists", key) from error
    except exceptions.PreconditionError as error:  # some stores respond so to a `create` of an existing object
        raise FileExistsError(errno.EEXIST, "the object exists", key) from error
    except exceptions.NotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", key) from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise PermissionError(errno.EACCES, f"the object store refused: {_first_line(error)}", key) from error
    except exceptions.BaseError as error:
        raise OSError(errno.EIO, f"the object store failed: {_first_line(error)}", key) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _require_obstore() -> None:
    if not _INSTALLED:
        raise CheckpointValueError(
            "checkpoints in object stores need obstore, which is not installed: python -m pip install obstore"
        )


class Opened(NamedTuple):
    """A store, and a position in it.

    Args:
        client: makes requests to the store.
        root: URL of the key "".
        key: key of the position.
    """

    client: ObstoreClient
    root: str
    key: str


def open_url(url: str, options: dict[str, Any]) -> Opened:
    """Open the store that a URL names.

    Args:
        url: `s3://bucket/prefix`, `gs://`, `az://`, ...; `file:///directory`; `memory://name/prefix`, a store in this
            process, shared by all URLs with this name.
        options: passed to `obstore.store.from_url`: credentials, region, endpoint, `client_options`, `retry_config`.

    Raises:
        CheckpointingException: obstore is missing, or does not accept the URL or the options.
    """
    _require_obstore()
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise CheckpointValueError(f"{url} has a query or fragment; pass options as arguments of ObjectPath.at")
    if parts.scheme in ("memory", "file"):
        if options:
            raise CheckpointValueError(f"{url} takes no options; given: {', '.join(sorted(options))}")
        root = f"{parts.scheme}://{parts.netloc}"
        return Opened(ObstoreClient(_own_store(parts)), root, unquote(parts.path).strip("/"))
    root = url.rstrip("/")
    try:
        return Opened(ObstoreClient(from_url(root, **options)), root, "")
    except (exceptions.BaseError, TypeError, ValueError) as error:
        raise CheckpointValueError(f"{url} cannot be opened: {_first_line(error)}") from error


def _own_store(url: SplitResult) -> Any:
    if url.scheme == "memory":
        return _memory_store(url.netloc)
    if url.netloc not in ("", "localhost"):
        raise CheckpointValueError(f"{url.geturl()} names a host; write file:///absolute/path")
    return LocalStore("/")


@cache
def _memory_store(name: str) -> Any:
    """The in-memory store of this name."""
    return MemoryStore()
