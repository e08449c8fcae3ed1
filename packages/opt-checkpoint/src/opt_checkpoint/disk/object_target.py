"""A save to an object store: writes all files under a unique prefix, and then one small object as the commit.

A save of `step-000000100` writes the same files as to a directory, below `step-000000100/<save id>/`. Then it creates
`step-000000100/commit.json`, which names the save id. Before that the checkpoint does not exist; after it, the
checkpoint is complete. Two saves to the same place never share a name, and only one of them can create the commit.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from queue import Queue
from typing import NamedTuple

from opt_checkpoint.disk.files import Files, discard
from opt_checkpoint.disk.index import CheckpointIndex
from opt_checkpoint.disk.lease import LEASE, Lease, holder_of, process_in
from opt_checkpoint.disk.manifest import MANIFEST
from opt_checkpoint.disk.save_target import DirectoryTarget, Output, SaveTarget
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointExistsError
from opt_checkpoint.objects.client import Listed
from opt_checkpoint.objects.path import Location, ObjectPath

COMMIT = "commit.json"
_SAVE_ID = re.compile("[0-9a-f]{32}")
_WAITING = 4  # pieces of at most 16 MB between the save and the upload


def target_of(path: Location, save_id: str, files: Files, *, replace: bool = False) -> SaveTarget:
    """The target of a save to a path.

    Args:
        path: the target of the save.
        save_id: 32 hexadecimal digits that name this save.
        files: the file system, for a path in one.
        replace: whether the commit replaces a checkpoint that is at `path`.
    """
    if isinstance(path, ObjectPath):
        return ObjectTarget(path, save_id, replace=replace)
    return DirectoryTarget(path, save_id, files, replace=replace)


class _ObjectLease(NamedTuple):
    """The object of a lease, which is rewritten to renew it."""

    place: ObjectPath

    def create(self, content: bytes) -> None:
        self.place.client.put(self.place.key, content)

    def renew(self) -> None:
        self.create(self.place.read_bytes())

    def renewed(self) -> float:
        return self.place.client.head(self.place.key).modified.timestamp()


class ObjectTarget:
    """A save to an object store; see `SaveTarget`.

    Args:
        path: the target, where no checkpoint may exist.
        save_id: 32 hexadecimal digits that name this save.
        replace: whether a checkpoint may exist there, which the commit replaces.
    """

    def __init__(self, path: ObjectPath, save_id: str, *, replace: bool = False) -> None:
        self.path, self._save_id, self._replace = path, save_id, replace
        self._lease: Lease | None = None
        self._committing = False

    @property
    def temporary(self) -> ObjectPath:
        """Prefix of the files, both before and after the commit."""
        return self.path / self._save_id

    def begin(self) -> None:
        if not self._replace and ((self.path / COMMIT).exists() or (self.path / MANIFEST).exists()):
            raise self._exists()
        self._lease = Lease(_ObjectLease(self.temporary / LEASE), self._save_id, self.path.name)
        remove_leftovers_of(self.path, self._lease.renewed)

    @contextmanager
    def new_file(self, name: str) -> Iterator[Output]:
        output = _Upload(self.temporary / name)
        try:
            yield output
        except BaseException:
            output.abort()
            raise
        output.close()

    def write_files(self, contents: Mapping[str, bytes]) -> None:
        for name, content in contents.items():
            self.path.client.put((self.temporary / name).key, content)

    def commit(self, index: CheckpointIndex) -> None:
        self._check_stored(index)
        self.release()
        self.temporary.delete([LEASE])
        content = encode_commit(self._save_id)
        self._committing = True
        try:
            write = self.path.client.put if self._replace else self.path.client.create
            write((self.path / COMMIT).key, content)
        except FileExistsError:  # created by this save, whose first answer was lost, or by another save
            if (self.path / COMMIT).read_bytes() != content:
                self._committing = False
                raise self._exists() from None
        except FileNotFoundError:  # the bucket is gone
            raise
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror} (when creating {self.path / COMMIT}: whether the checkpoint was committed is "
                f"unknown; its files stay)",
            ) from error

    def _check_stored(self, index: CheckpointIndex) -> None:
        """Raise unless every file exists and has its size: another save may have removed files if the lease expired."""
        sizes = stored_sizes(self.temporary, [*index.files, MANIFEST])
        wrong = [name for name, file in index.files.items() if sizes.get(name) != file.size]
        if wrong or MANIFEST not in sizes:
            raise CheckpointCorruptError(
                f"{self.temporary} does not hold what was written: {', '.join(wrong[:4]) or MANIFEST} is missing or "
                f"has another size; nothing was committed"
            )

    def _exists(self) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"{self.path} exists, and a checkpoint is never overwritten. Choose another place, or remove it first"
        )

    def release(self) -> None:
        if self._lease is not None:
            self._lease.release()

    def abandon(self) -> None:
        self.release()
        if not self._committing:
            self.temporary.delete(list(self.temporary.listing()))


def encode_commit(save_id: str) -> bytes:
    """The content of the commit object."""
    return json.dumps({"opt-checkpoint": "commit", "save_id": save_id}).encode()


def committed_place(path: ObjectPath) -> ObjectPath | None:
    """The place of the files of the checkpoint at a path; None if none was committed.

    A complete directory that was uploaded unchanged counts too: its manifest is directly at the path.

    Raises:
        CheckpointCorruptError: the commit object is damaged.
        OSError: the store did not respond.
    """
    save_id = _committed_id(path)
    if save_id is not None:
        return path / save_id
    return path if (path / MANIFEST).exists() else None


def _committed_id(path: ObjectPath) -> str | None:
    try:
        raw = (path / COMMIT).read_bytes()
    except FileNotFoundError:
        return None
    try:
        save_id = json.loads(raw)["save_id"]
    except (ValueError, KeyError, TypeError):
        save_id = None
    if not isinstance(save_id, str) or not _SAVE_ID.fullmatch(save_id):
        raise CheckpointCorruptError(f"{path / COMMIT} is damaged: it does not name a save")
    return save_id


def stored_sizes(place: ObjectPath, names: list[str]) -> Mapping[str, int]:
    """Sizes of the objects directly below a place, by name. Objects missing in a listing are requested by name."""
    sizes = {name: found.size for name, found in place.listing().items()}
    for name in names:
        if name not in sizes:
            try:
                sizes[name] = place.client.head((place / name).key).size
            except FileNotFoundError:
                continue
    return sizes


class Leftover(NamedTuple):
    """Files of a save that was not committed.

    Args:
        place: their common prefix.
        names: names of the objects.
        writer: who may still write there; None if certainly no process does.
    """

    place: ObjectPath
    names: list[str]
    writer: str | None

    def remove(self) -> None:
        """Delete the files."""
        self.place.delete(self.names)


def clock_of_store(directory: ObjectPath) -> float:
    """The time by the clock of an object store. Raises OSError if no object can be written there."""
    probe = directory / f".opt-checkpoint-clock-{uuid.uuid4().hex}"
    probe.client.put(probe.key, b"{}")
    try:
        return probe.client.head(probe.key).modified.timestamp()
    finally:
        directory.delete([probe.name])


def leftovers_of(path: ObjectPath, now: float) -> list[Leftover]:
    """Files of saves to a path that were not committed.

    Args:
        path: the target of the saves, a checkpoint or not.
        now: the time, by the clock of the store.

    Raises:
        CheckpointCorruptError: the commit object is damaged, so it is unknown which save was committed.
        OSError: the store did not respond.
    """
    by_save: dict[str, dict[str, Listed]] = {}
    for name, found in path.listing().items():
        save_id, _, file = name.partition("/")
        if _SAVE_ID.fullmatch(save_id) and file:
            by_save.setdefault(save_id, {})[file] = found
    committed = _committed_id(path)  # after the listing: a save that commits in between is seen
    return [
        Leftover(path / save_id, list(files), _writer_of(path / save_id, files, now))
        for save_id, files in sorted(by_save.items())
        if save_id != committed
    ]


def _writer_of(place: ObjectPath, files: Mapping[str, Listed], now: float) -> str | None:
    changes = [found.modified.timestamp() for found in files.values()]
    held = None
    try:
        held = process_in((place / LEASE).read_bytes())
        changes.append(place.client.head((place / LEASE).key).modified.timestamp())
    except FileNotFoundError:  # never written, or removed by a save that is about to commit
        pass
    return holder_of(held, place.name, now - max(changes))


def remove_leftovers_of(path: ObjectPath, now: float) -> None:
    """Delete the files of saves to a path that were not committed and no longer have a writer."""
    for leftover in leftovers_of(path, now):
        if leftover.writer is None:
            leftover.remove()


def remove_leftovers_below(directory: ObjectPath, checkpoint: ObjectPath) -> None:
    """Delete the files of dead saves to any place directly below a directory.

    Args:
        directory: the directory of the checkpoints.
        checkpoint: the last committed one, from which the store's clock is read.
    """
    now = checkpoint.client.head((checkpoint / COMMIT).key).modified.timestamp()
    for path in directory.folders():
        remove_leftovers_of(path, now)


def discard_checkpoint(files: Files, path: Location) -> None:
    """Delete a checkpoint so that no reader finds a part of one; in an object store, the commit is deleted first."""
    if not isinstance(path, ObjectPath):
        discard(files, path, uuid.uuid4().hex)
        return
    place = committed_place(path)
    path.delete([COMMIT])
    if place is not None:
        place.delete([MANIFEST])
        place.delete(list(place.listing()))


class _Aborted(Exception):
    """Ends an upload without creating an object."""


class _Upload:
    """`Output` to an object. A thread sends finished parts while the others are computed."""

    def __init__(self, place: ObjectPath) -> None:
        self._place = place
        self._queue: Queue[bytes | memoryview | _Aborted | None] = Queue(_WAITING)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._send, name=f"opt-checkpoint upload {place.name}")
        self._thread.start()

    def append(self, data: bytes | memoryview) -> None:
        if self._error is not None:
            raise self._error
        if len(data):
            self._queue.put(data)

    def start_writeback(self, start: int, nbytes: int) -> None:
        """Do nothing: parts are sent as soon as they are complete."""

    def close(self) -> None:
        """Wait until the object is stored.

        Raises:
            OSError: the store refused the request or did not respond.
        """
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """End the upload; no object appears."""
        self._queue.put(_Aborted())
        self._thread.join()

    def _send(self) -> None:
        ended = False

        def parts() -> Iterator[bytes | memoryview]:
            nonlocal ended
            while (part := self._queue.get()) is not None:
                if isinstance(part, _Aborted):
                    ended = True
                    raise part
                yield part
            ended = True

        try:
            self._place.client.upload(self._place.key, parts())
        except BaseException as error:  # raised where the save appends or closes
            self._error = error
        while not ended:  # the upload has ended: unblock a writer that waits for room in the queue
            part = self._queue.get()
            ended = part is None or isinstance(part, _Aborted)
