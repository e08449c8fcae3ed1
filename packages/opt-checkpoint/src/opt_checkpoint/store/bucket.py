"""A store in a bucket. A save writes all files under a unique prefix, and then one small object as the commit.

A save of `step-000000100` writes the same files as to a directory, below `step-000000100/<save id>/`. Then it creates
`step-000000100/commit.json`, which names the save id. Before that the checkpoint does not exist; after it, the
checkpoint is complete. Two saves to the same place never share a name, and only one of them can create the commit.

Requests are made with obstore: to S3, Google Cloud Storage, Azure and memory. Their errors are `OSError`s:
`FileNotFoundError` if an object is known to be absent, `FileExistsError` if a creation found one, `PermissionError`,
and `OSError` with `EIO` for everything else. Other errors never mean that an object is absent.
"""

from __future__ import annotations

import errno
import json
import random
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.store.lease import LEASE, Lease, holder_of, release, stop_renewing
from opt_checkpoint.store.paths import ObjectPath
from opt_checkpoint.store.store import MANIFEST, Content, Leftover, already_there, call, named_in

with suppress(ImportError):  # an extra
    import obstore
    from obstore import exceptions

T = TypeVar("T")
Meta: TypeAlias = Mapping[str, Any]  # of an object: path, size, last_modified
COMMIT = "commit.json"
_SAVE_ID = "[0-9a-f]{32}"
_REQUEST_BYTES = 8 << 20  # a longer read is several requests at the same time
_PART_BYTES = 32 << 20  # S3 allows 10,000 parts: files of up to 320 GB
_PARTS_AT_ONCE = 8
_COALESCED_BYTES = 1 << 20  # gap in bytes up to which two ranges are fetched by one request
_ATTEMPTS = 3
_FIRST_WAIT_S = 0.5


class Bucket:
    """`Store` in a bucket.

    Args:
        place: the common prefix of its keys.
    """

    near_bytes = 1 << 20
    read_bytes = 8 * _REQUEST_BYTES

    def __init__(self, place: ObjectPath) -> None:
        if place.store is None:
            raise RuntimeError(f"{place} came from another process, without credentials")
        self._place = place
        self._store = place.store
        self._unknown: set[str] = set()  # folders of saves that may have been committed

    def path(self, name: str = "") -> ObjectPath:
        return self._place / name if name else self._place

    # --- a save ---

    def folder(self, target: str, save_id: str) -> str:
        return _joined(target, save_id)

    def check_free(self, target: str) -> None:
        if any(self._exists(_joined(target, name)) for name in (COMMIT, MANIFEST)):
            raise already_there(self.path(target))

    def begin(self, target: str, folder: str, *, replace: bool = False) -> None:
        if not replace:
            self.check_free(target)
        lease = _joined(folder, LEASE)
        renew = lambda content: self.put(lease, content)
        Lease(folder, self.path(target).name, renew).start(renew)
        now = _time_of(self._head(lease))
        # A damaged commit is replaced: which files it named is unknown, and all stay.
        with suppress(CheckpointCorruptError):
            for left in self._leftovers_of(target, now):
                if left.writer is None:
                    self.discard(left.folder)

    def write(self, name: str, content: Content) -> None:
        """Write an object from its content, which is read again from the start after a failure.

        The object appears only after all of it. If reading them raises, so does this, and no object appears.
        """
        failures: list[BaseException] = []

        def read() -> Iterator[bytes | memoryview]:
            try:
                yield from (piece for piece in content() if len(piece))
            except GeneratorExit:  # obstore has given up; it raises its own error
                raise
            except BaseException as error:
                failures.append(error)
                raise

        def send(key: str) -> None:
            try:
                obstore.put(
                    self._store, key, read(), use_multipart=True, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE
                )
            except BaseException:
                if failures:  # else obstore would raise it as its own
                    raise failures.pop() from None
                raise

        self._make("upload", name, send)

    def write_small(self, folder: str, contents: Mapping[str, bytes]) -> None:
        for name, content in contents.items():
            self.put(_joined(folder, name), content)

    def check_files(self, folder: str, sizes: Mapping[str, int]) -> None:
        stored = Bucket(self.path(folder)).sizes(sizes)
        wrong = [name for name, size in sizes.items() if stored.get(name) != size]
        if wrong:
            raise CheckpointCorruptError(
                f"{self.path(folder)} does not hold what was written: {', '.join(wrong[:4])} is missing or has another "
                f"size; nothing was committed"
            )

    def commit(self, target: str, folder: str, *, replace: bool = False) -> None:
        """Create the commit object.

        Raises:
            OSError: the message says so if it is unknown whether the checkpoint was committed.
        """
        commit = _joined(target, COMMIT)
        stop_renewing(folder)
        self.remove(_joined(folder, LEASE))
        content = encode_commit(folder.rpartition("/")[2])
        self._unknown.add(folder)
        try:
            (self.put if replace else self._create)(commit, content)
        except FileExistsError:  # created by this save, whose first answer was lost, or by another save
            if self.read(commit) != content:
                self._unknown.discard(folder)
                raise already_there(self.path(target)) from None
        except FileNotFoundError:  # the bucket is gone
            raise
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror} (when creating {self.path(commit)}: whether the checkpoint was committed is "
                f"unknown; its files stay)",
            ) from error
        release(folder)

    def abandon(self, folder: str) -> None:
        try:
            if folder not in self._unknown:
                self.discard(folder)
        finally:
            release(folder)

    def committed(self, target: str = "") -> str | None:
        """Return the folder that the commit names. A complete directory that was uploaded unchanged counts too.

        Raises:
            CheckpointCorruptError: the commit is damaged, or what it names was deleted.
        """
        save_id = self._committed_id(target)
        if save_id is not None:
            return self.folder(target, save_id)
        return target if self._exists(_joined(target, MANIFEST)) else None

    def _committed_id(self, target: str) -> str | None:
        return named_in(self, _joined(target, COMMIT), "save_id", _SAVE_ID)

    def _exists(self, name: str) -> bool:
        try:
            self._head(name)
        except FileNotFoundError:
            return False
        return True

    def _head(self, name: str) -> Meta:
        """Path, size and time of an object."""
        return self._make("head", name, lambda key: obstore.head(self._store, key))

    # --- reading ---

    def read(self, name: str) -> bytes:
        return self._make("get", name, lambda key: bytes(obstore.get(self._store, key).bytes()))

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        for first in range(0, len(view), self.read_bytes):
            part = view[first:][: self.read_bytes]
            starts = list(range(start + first, start + first + len(part), _REQUEST_BYTES))
            ends = [*starts[1:], start + first + len(part)]
            try:
                request = lambda key, starts=starts, ends=ends: list(
                    obstore.get_ranges(self._store, key, starts=starts, ends=ends, coalesce=_COALESCED_BYTES)
                )
                detail = ",".join(f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
                ranges = [memoryview(found) for found in self._make("get_ranges", name, request, detail)]
            except FileNotFoundError:
                raise
            except OSError as error:
                if self._head(name)["size"] < ends[-1]:
                    raise EOFError(f"it ends before byte {ends[-1]}") from error
                raise
            for position, end, found in zip(starts, ends, ranges, strict=True):
                if len(found) != end - position:
                    raise EOFError(f"it ends before byte {end}")
                view[position - start : end - start] = found

    def sizes(self, names: Iterable[str] | None = None) -> dict[str, int]:
        found = {name: meta["size"] for name, meta in self._listing("").items()}
        for name in names or ():
            if name not in found:  # a listing may lag
                with suppress(FileNotFoundError):
                    found[name] = self._head(name)["size"]
        return found

    def _listing(self, folder: str) -> dict[str, Meta]:
        """All objects below a folder, by the rest of their keys."""
        request = lambda key: [meta for page in obstore.list(self._store, key or None) for meta in page]
        prefix = self.path(folder).key
        return {meta["path"][len(prefix) :].lstrip("/"): meta for meta in self._make("listing", folder, request)}

    def children(self, folder: str = "") -> list[str]:
        """Return the distinct next parts of keys below a folder that have further parts, like subdirectories."""

        def request(key: str) -> list[str]:
            found = obstore.list_with_delimiter(self._store, key or None)["common_prefixes"]
            return sorted(child.rstrip("/").rpartition("/")[2] for child in found)

        return self._make("folders", folder, request)

    # --- small files and deletions ---

    def put(self, name: str, content: bytes) -> None:
        self._make("put", name, lambda key: obstore.put(self._store, key, content, use_multipart=False))

    def _create(self, name: str, content: bytes) -> None:
        """Raises FileExistsError if the object exists, even if an earlier attempt of this call wrote it."""
        self._make("create", name, lambda key: obstore.put(self._store, key, content, mode="create"))

    def remove(self, name: str) -> None:
        self._delete([self.path(name).key])

    def retire(self, target: str) -> None:
        """Delete the commit first, then the manifest, then the files."""
        folder = self.committed(target)
        self.remove(_joined(target, COMMIT))
        if folder is not None:
            self.remove(_joined(folder, MANIFEST))
            self.discard(folder)

    def discard(self, folder: str) -> None:
        self._delete([meta["path"] for meta in self._listing(folder).values()])

    def _delete(self, keys: list[str]) -> None:
        """Delete objects, many by one request where the store can. Missing ones are ignored."""
        if not keys:
            return
        try:
            self._request("delete", ",".join(keys), lambda: obstore.delete(self._store, keys))
        except FileNotFoundError:  # some stores report absent objects, and may not have deleted the others
            if len(keys) > 1:
                for key in keys:
                    self._delete([key])

    def _make(self, request: str, name: str, act: Callable[[str], T], detail: str = "") -> T:
        """Make a request for the object of a name."""
        key = self.path(name).key
        return self._request(request, key, lambda: act(key), detail)

    @staticmethod
    def _request(name: str, key: str, act: Callable[[], T], detail: str = "") -> T:
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
                raise FileNotFoundError(errno.ENOENT, "the object does not exist", key) from error
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

    def leftovers(self, targets: Iterable[str] | None = None) -> list[Leftover]:
        wanted = self.children() if targets is None else list(targets)
        if not wanted:
            return []
        probe = f".opt-checkpoint-clock-{uuid.uuid4().hex}"
        self.put(probe, b"{}")
        try:
            now = _time_of(self._head(probe))
        finally:
            self.remove(probe)
        return [left for target in wanted for left in self._leftovers_of(target, now)]

    def _leftovers_of(self, target: str, now: float) -> list[Leftover]:
        """Folders of saves to a target that were not committed; `now` is the time by the clock of the store.

        Raises:
            CheckpointCorruptError: the commit is damaged, so it is unknown which save was committed.
        """
        changes: dict[str, list[float]] = {}  # when objects of each save were written
        for name, meta in self._listing(target).items():
            save_id, _, file = name.partition("/")
            if re.fullmatch(_SAVE_ID, save_id) and file:
                changes.setdefault(save_id, []).append(_time_of(meta))
        committed = self._committed_id(target)  # after the listing: a save that commits in between is seen
        changes.pop(committed or "", None)
        folders = {self.folder(target, save_id): times for save_id, times in sorted(changes.items())}
        return [Leftover(folder, self._writer_of(folder, times, now)) for folder, times in folders.items()]

    def _writer_of(self, folder: str, changes: list[float], now: float) -> str | None:
        lease = b""
        name = _joined(folder, LEASE)
        with suppress(FileNotFoundError):  # never written, or removed by a save that is about to commit
            lease = self.read(name)
            changes.append(_time_of(self._head(name)))
        return holder_of(lease, folder, now - max(changes))


def encode_commit(save_id: str) -> bytes:
    """Return the content of the commit object."""
    return json.dumps({"opt-checkpoint": "commit", "save_id": save_id}).encode()


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _time_of(meta: Meta) -> float:
    """When an object was written, by the clock of the store."""
    return float(meta["last_modified"].timestamp())


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
