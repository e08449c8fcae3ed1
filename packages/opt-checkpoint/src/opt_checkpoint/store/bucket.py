"""A store in a bucket. A save writes all files under a unique prefix, and then one small object as the commit.

A save of `step-000000100` writes the same files as to a directory, below `step-000000100/<save id>/`. Then it creates
`step-000000100/commit.json`, which names the save id. Before that the checkpoint does not exist; after it, the
checkpoint is complete. Two saves to the same place never share a name, and only one of them can create the commit.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress

from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.store.lease import LEASE, Lease, holder_of
from opt_checkpoint.store.paths import Listed, ObjectPath
from opt_checkpoint.store.store import MANIFEST, Leftover, Parts, already_there

COMMIT = "commit.json"
_SAVE_ID = re.compile("[0-9a-f]{32}")
_REQUEST_BYTES = 8 << 20  # a longer read is several requests at the same time


class Bucket:
    """`Store` in a bucket.

    Args:
        place: the common prefix of its keys.
    """

    near_bytes, read_bytes = 1 << 20, 8 * _REQUEST_BYTES

    def __init__(self, place: ObjectPath) -> None:
        if place.requests is None:
            raise RuntimeError(f"{place} came from another process, without credentials")
        self._place, self._requests = place, place.requests
        self._leases: dict[str, Lease] = {}
        self._unknown: set[str] = set()  # saves that may have been committed

    def path(self, name: str = "") -> ObjectPath:
        return self._place / name if name else self._place

    def _key(self, name: str) -> str:
        return self.path(name).key

    # --- a save ---

    def folder(self, target: str, save_id: str) -> str:
        return _joined(target, save_id)

    def begin(self, target: str, save_id: str, *, replace: bool = False) -> None:
        if not replace and any(self._exists(_joined(target, name)) for name in (COMMIT, MANIFEST)):
            raise already_there(self.path(target))
        folder = self.folder(target, save_id)
        key = self._key(_joined(folder, LEASE))
        renew = lambda content: self._requests.put(key, content)
        self._leases[save_id] = Lease(folder, self.path(target).name, renew, renew)
        now = self._requests.head(key).modified.timestamp()
        # A damaged commit is replaced: which files it named is unknown, and all stay.
        with suppress(CheckpointCorruptError):
            for left in self._leftovers_of(target, now):
                if left.writer is None:
                    self.discard(left.folder)

    def write(self, name: str, parts: Parts) -> None:
        self._requests.upload(self._key(name), parts)

    def write_small(self, folder: str, contents: Mapping[str, bytes]) -> None:
        for name, content in contents.items():
            self.put(_joined(folder, name), content)

    def commit(self, target: str, save_id: str, sizes: Mapping[str, int], *, replace: bool = False) -> None:
        """Check that all files are there, and create the commit object.

        Raises:
            OSError: the message says so if it is unknown whether the checkpoint was committed.
        """
        folder, commit = self.folder(target, save_id), _joined(target, COMMIT)
        stored = self.sizes(folder, sizes)  # another save may have removed files if the lease had expired
        wrong = [name for name, size in sizes.items() if stored.get(name) != size]
        if wrong:
            raise CheckpointCorruptError(
                f"{self.path(folder)} does not hold what was written: {', '.join(wrong[:4])} is missing or has another "
                f"size; nothing was committed"
            )
        self.release(save_id)
        self.remove(_joined(folder, LEASE))
        content = encode_commit(save_id)
        self._unknown.add(save_id)
        try:
            write = self._requests.put if replace else self._requests.create
            write(self._key(commit), content)
        except FileExistsError:  # created by this save, whose first answer was lost, or by another save
            if self.read(commit) != content:
                self._unknown.discard(save_id)
                raise already_there(self.path(target)) from None
        except FileNotFoundError:  # the bucket is gone
            raise
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror} (when creating {self.path(commit)}: whether the checkpoint was committed is "
                f"unknown; its files stay)",
            ) from error

    def release(self, save_id: str) -> None:
        if (lease := self._leases.pop(save_id, None)) is not None:
            lease.release()

    def abandon(self, target: str, save_id: str) -> None:
        self.release(save_id)
        if save_id not in self._unknown:
            self.discard(self.folder(target, save_id))

    def committed(self, target: str = "") -> str | None:
        """The folder that the commit names. A complete directory that was uploaded unchanged counts too.

        Raises:
            CheckpointCorruptError: the commit is damaged, or what it names was deleted.
        """
        save_id = self._committed_id(target)
        if save_id is not None:
            return self.folder(target, save_id)
        return target if self._exists(_joined(target, MANIFEST)) else None

    def _committed_id(self, target: str) -> str | None:
        name = _joined(target, COMMIT)
        try:
            raw = self.read(name)
        except FileNotFoundError:
            return None
        try:
            save_id = json.loads(raw)["save_id"]
        except (ValueError, KeyError, TypeError):
            save_id = None
        if not isinstance(save_id, str) or not _SAVE_ID.fullmatch(save_id):
            raise CheckpointCorruptError(f"{self.path(name)} is damaged: it does not name a save")
        return save_id

    def _exists(self, name: str) -> bool:
        try:
            self._requests.head(self._key(name))
        except FileNotFoundError:
            return False
        return True

    # --- reading ---

    def read(self, name: str, *, follow: bool = False) -> bytes:
        return self._requests.get(self._key(name))

    def read_into(self, name: str, start: int, view: memoryview, *, follow: bool = False) -> None:
        key = self._key(name)
        for first in range(0, len(view), self.read_bytes):
            part = view[first:][: self.read_bytes]
            starts = list(range(start + first, start + first + len(part), _REQUEST_BYTES))
            ends = [*starts[1:], start + first + len(part)]
            try:
                ranges = [memoryview(found) for found in self._requests.get_ranges(key, starts, ends)]
            except FileNotFoundError:
                raise
            except OSError as error:
                if self._requests.head(key).size < ends[-1]:
                    raise EOFError(f"it ends before byte {ends[-1]}") from error
                raise
            for position, end, found in zip(starts, ends, ranges, strict=True):
                if len(found) != end - position:
                    raise EOFError(f"it ends before byte {end}")
                view[position - start : end - start] = found

    def sizes(self, folder: str = "", names: Iterable[str] | None = None) -> dict[str, int]:
        found = {name: listed.size for name, listed in self._listing(folder).items()}
        for name in names or ():
            if name not in found:  # a listing may lag
                with suppress(FileNotFoundError):
                    found[name] = self._requests.head(self._key(_joined(folder, name))).size
        return found

    def _listing(self, folder: str) -> dict[str, Listed]:
        """All objects below a folder, by the rest of their keys."""
        prefix = self._key(folder)
        return {listed.key[len(prefix) :].lstrip("/"): listed for listed in self._requests.listing(prefix)}

    def children(self, folder: str = "") -> list[str]:
        return self._requests.folders(self._key(folder))

    # --- small files and deletions ---

    def put(self, name: str, content: bytes) -> None:
        self._requests.put(self._key(name), content)

    def create(self, name: str, content: bytes) -> None:
        with suppress(FileExistsError):
            self._requests.create(self._key(name), content)

    def remove(self, name: str) -> None:
        self._requests.delete([self._key(name)])

    def retire(self, target: str) -> None:
        """Delete the commit first, then the manifest, then the files."""
        folder = self.committed(target)
        self.remove(_joined(target, COMMIT))
        if folder is not None:
            self.remove(_joined(folder, MANIFEST))
            self.discard(folder)

    def discard(self, folder: str) -> None:
        self._requests.delete([listed.key for listed in self._listing(folder).values()])

    def leftovers(self, targets: Iterable[str] | None = None) -> list[Leftover]:
        wanted = self.children() if targets is None else list(targets)
        if not wanted:
            return []
        probe = f".opt-checkpoint-clock-{uuid.uuid4().hex}"
        self.put(probe, b"{}")
        try:
            now = self._requests.head(self._key(probe)).modified.timestamp()
        finally:
            self.remove(probe)
        return [left for target in wanted for left in self._leftovers_of(target, now)]

    def _leftovers_of(self, target: str, now: float) -> list[Leftover]:
        """Folders of saves to a target that were not committed; `now` is the time by the clock of the store.

        Raises:
            CheckpointCorruptError: the commit is damaged, so it is unknown which save was committed.
        """
        by_save: dict[str, dict[str, Listed]] = {}
        for name, listed in self._listing(target).items():
            save_id, _, file = name.partition("/")
            if _SAVE_ID.fullmatch(save_id) and file:
                by_save.setdefault(save_id, {})[file] = listed
        committed = self._committed_id(target)  # after the listing: a save that commits in between is seen
        return [
            Leftover(self.folder(target, save_id), self._writer_of(self.folder(target, save_id), files, now))
            for save_id, files in sorted(by_save.items())
            if save_id != committed
        ]

    def _writer_of(self, folder: str, files: Mapping[str, Listed], now: float) -> str | None:
        lease, name = b"", _joined(folder, LEASE)
        changes = [listed.modified.timestamp() for listed in files.values()]
        with suppress(FileNotFoundError):  # never written, or removed by a save that is about to commit
            lease = self.read(name)
            changes.append(self._requests.head(self._key(name)).modified.timestamp())
        return holder_of(lease, folder, now - max(changes))


def encode_commit(save_id: str) -> bytes:
    """The content of the commit object."""
    return json.dumps({"opt-checkpoint": "commit", "save_id": save_id}).encode()


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
