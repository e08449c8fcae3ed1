"""A store in a directory of a mounted file system. A save is committed by one rename.

A save writes to `.opt-checkpoint-tmp-<id>` next to its target, and a deletion first renames to
`.opt-checkpoint-deleting-<id>`, so that no reader sees a part of a checkpoint under its own name. Every write, rename
and deletion goes through `store.call`.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path

from opt_checkpoint.errors import CheckpointCorruptError
from opt_checkpoint.store.lease import LEASE, Lease, holder_of, release, stop_renewing
from opt_checkpoint.store.store import MANIFEST, Content, Leftover, already_there, call

logger = logging.getLogger(__name__)
_TEMPORARY = ".opt-checkpoint-tmp-"
_DELETING = ".opt-checkpoint-deleting-"
_LEFTOVER = re.compile(rf"(?:{re.escape(_TEMPORARY)}|{re.escape(_DELETING)})[0-9a-f]{{32}}")
_FILES = re.compile(
    r"__\d+_\d+\.distcp|manifest\.bin|metadata\.json|\.metadata|lease\.json|"
    r"model(?:-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)
_WRITEBACK_BYTES = 4 << 20  # also the granularity, so that a page that is still filled is not written twice
_OPEN_FILES = 64  # a checkpoint of a thousand ranks has a thousand files
_RETRIES = 3


def is_leftover(name: str) -> bool:
    """Return whether a directory has the name of a temporary directory of a save or deletion."""
    return _LEFTOVER.fullmatch(name) is not None


class _Descriptor:
    """A file that is open for reading, closed with the last reference: a thread may still read what another evicts."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Directory:
    """`Store` in a directory.

    Args:
        root: the directory.
        sync: whether files must survive a power loss of this machine.
        follow: whether files may be symbolic links.
    """

    near_bytes = 16 << 10
    read_bytes = 4 << 20  # fits the processor's cache

    def __init__(self, root: Path, *, sync: bool = True, follow: bool = False) -> None:
        self.root = root
        self._sync = sync
        self._follow = follow
        # Closed with this object: the function does not refer to it.
        self._opened = lru_cache(_OPEN_FILES)(lambda name: _Descriptor(open_regular(root / name, follow=follow)))

    def path(self, name: str = "") -> Path:
        return self.root / name

    # --- a save ---

    def folder(self, target: str, save_id: str) -> str:
        return f"{target.rpartition('/')[0]}/{_TEMPORARY}{save_id}".lstrip("/")

    def check_free(self, target: str) -> None:
        if os.path.lexists(self.path(target)):
            raise already_there(self.path(target))

    def begin(self, target: str, folder: str, *, replace: bool = False) -> None:
        path = self.path(target)
        new = self.path(folder)
        if not replace:
            self.check_free(target)
        self.make_parents(path)
        self._delete_leftovers(path.parent, now=-math.inf)  # of dead processes here, in case they have filled the disk
        self.make_dir(new)
        lease = new / LEASE
        Lease(folder, path.name, lambda _: os.utime(lease)).start(lambda content: self._write_now(lease, content))
        self._delete_leftovers(path.parent, now=lease.stat().st_mtime, but=new)

    def _delete_leftovers(self, parent: Path, *, now: float, but: Path | None = None) -> None:
        """Delete what saves left to which, at the time `now`, certainly no process writes."""
        for left in _leftovers_in(parent):
            try:
                if left != but and _writer_of(left, now) is None:
                    self._delete(left)
            except FileNotFoundError:  # another process deletes it too
                continue
            except OSError as error:
                logger.warning("could not remove %s, which an interrupted save left: %s", left, error)

    def write(self, name: str, content: Content) -> None:
        written = 0
        started = 0
        path = self.path(name)
        with self._file(path) as fd:
            for piece in content():
                _append(fd, path, piece)
                written += len(piece)
                ready = (written - started) // _WRITEBACK_BYTES * _WRITEBACK_BYTES
                if self._sync and ready and sys.platform == "linux":
                    # For dirty pages, DONTNEED makes Linux start writeback; it keeps the pages until they are on disk.
                    os.posix_fadvise(fd, started, ready, os.POSIX_FADV_DONTNEED)
                    started += ready

    def write_small(self, folder: str, contents: Mapping[str, bytes]) -> None:
        with ExitStack() as synced:  # all are written before the first sync, which often syncs all of them
            for name, content in contents.items():
                path = self.path(f"{folder}/{name}")
                _append(synced.enter_context(self._file(path)), path, content)

    def check_files(self, folder: str, sizes: Mapping[str, int]) -> None:
        """Do nothing: a folder is renamed before it is deleted, so that the rename of the commit fails."""

    def commit(self, target: str, folder: str, *, replace: bool = False) -> None:
        """Sync the folder, rename it, and sync its parent.

        If only the last step fails, the checkpoint stays: it is complete, and a reader may have opened it.
        """
        path = self.path(target)
        new = self.path(folder)
        stop_renewing(folder)
        self._remove_file(new / LEASE)
        self.sync_dir(new)
        old = None
        try:
            if replace and path.is_dir():  # abandoned or damaged; a crash before the next rename loses it
                old = path.with_name(f"{_DELETING}{uuid.uuid4().hex}")
                self.rename(path, old)
            self.rename(new, path)
        except BaseException as error:  # also Ctrl-C, before or after any of the renames
            if old is not None and os.path.lexists(old) and not os.path.lexists(path):
                self.rename(old, path)
            if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise already_there(path) from error  # another save has committed in the meantime
            raise
        release(folder)
        try:
            self.sync_dir(path.parent)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror} (when syncing {path.parent}: {path.name} is complete, but a power failure may still "
                f"remove its name)",
            ) from error
        if old is not None:
            try:
                self._delete(old)
            except OSError as error:  # the checkpoint is committed; the next save tries again
                logger.warning("could not remove %s: %s", old, error)

    def abandon(self, folder: str) -> None:
        try:
            if self.path(folder).is_dir():
                self.discard(folder)
        finally:
            release(folder)

    def committed(self, target: str = "") -> str | None:
        return None if _mode_of(self.path(target) / MANIFEST) is None else target

    # --- reading ---

    def read(self, name: str) -> bytes:
        with open(open_regular(self.path(name), follow=self._follow), "rb") as file:
            return file.read()

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        opened = self._opened(name)
        while len(view):
            count = os.preadv(opened.fd, [view[: 1 << 30]], start)
            if not count:
                raise EOFError(f"it ends at byte {start}")
            start = start + count
            view = view[count:]

    def sizes(self, names: Iterable[str] | None = None) -> dict[str, int]:
        sizes = {}
        for name in os.listdir(self.root) if names is None else names:
            with suppress(FileNotFoundError):
                found = (self.root / name).lstat()
                sizes[name] = found.st_size if stat.S_ISREG(found.st_mode) else -1
        return sizes

    def children(self, folder: str = "") -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(entry.name for entry in self.path(folder).iterdir() if stat.S_ISDIR(_mode_of(entry) or 0))
        return []

    # --- small files and deletions ---

    def put(self, name: str, content: bytes) -> None:
        path = self.path(name)
        self.make_parents(path)
        new = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
        try:
            with self._file(new) as fd:
                _append(fd, new, content)
            self.rename(new, path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        self.sync_dir(path.parent)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._remove_file(self.path(name))

    def retire(self, target: str) -> None:
        self.discard(target)

    def discard(self, folder: str) -> None:
        self._delete(self.path(folder))

    def _delete(self, path: Path) -> None:
        """Delete a directory, or a link to one, after it was renamed so that nobody reads it."""
        gone = path if path.name.startswith(_DELETING) else path.with_name(f"{_DELETING}{uuid.uuid4().hex}")
        if gone != path:
            self.rename(path, gone)
        call("remove_tree", str(gone), gone.unlink if gone.is_symlink() else lambda: shutil.rmtree(gone))

    def leftovers(self, targets: Iterable[str] | None = None) -> list[Leftover]:
        found = _leftovers_in(self.root)
        if not found:
            return []
        probe = self.root / f".opt-checkpoint-clock-{uuid.uuid4().hex}"  # the clock may be that of another machine
        self._write_now(probe, b"")
        try:
            now = probe.stat().st_mtime
        finally:
            self._remove_file(probe)
        return [Leftover(path.name, _writer_of(path, now)) for path in found]

    # --- system calls ---

    def rename(self, source: Path, target: Path) -> None:
        """Move a file, or a directory to a name where nothing or an empty directory is."""
        call("rename", str(source), lambda: os.rename(source, target), str(target))

    def sync_dir(self, path: Path) -> None:
        """Make the names in a directory survive a power loss."""

        def sync() -> None:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

        if self._sync:
            call("sync_dir", str(path), sync)

    def make_dir(self, path: Path) -> None:
        """Create a directory in an existing parent. Raises FileExistsError if it exists."""
        call("make_dir", str(path), path.mkdir)

    def make_parents(self, path: Path) -> None:
        """Create the missing parent directories of `path`, and sync each one's name."""
        for parent in reversed([parent for parent in path.parents if not parent.exists()]):
            with suppress(FileExistsError):  # another save made it in the meantime
                self.make_dir(parent)
                self.sync_dir(parent.parent)

    def _remove_file(self, path: Path) -> None:
        call("remove", str(path), path.unlink)

    @contextmanager
    def _file(
        self, path: Path, name: str = "create", flags: int = os.O_CREAT | os.O_EXCL, *, sync: bool = True
    ) -> Iterator[int]:
        """The descriptor of a file that is written, by default a new one; synced if the block ends without an error."""
        fd = call(name, str(path), lambda: os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o644))
        try:
            yield fd
            if sync and self._sync:
                call("fsync", str(path), lambda: os.fsync(fd))
        finally:
            os.close(fd)

    @contextmanager
    def shared_file(self, name: str, *, is_new: bool = False) -> Iterator[Callable[[memoryview, int], None]]:
        """Provide a function that writes bytes to a position of a file that several ranks write; synced at the end."""
        path = self.path(name)
        with self._file(path) if is_new else self._file(path, "reopen", 0) as fd:
            yield lambda data, at: _write_all(path, data, lambda rest: os.pwrite(fd, rest, at + len(data) - len(rest)))

    def _write_now(self, path: Path, content: bytes) -> None:
        """Write a new file that need not survive a power loss."""
        with self._file(path, sync=False) as fd:
            _append(fd, path, content)


def _append(fd: int, path: Path, data: bytes | memoryview) -> None:
    """Write bytes at the end of an open file."""
    _write_all(path, memoryview(data), lambda rest: os.write(fd, rest))


def _write_all(path: Path, view: memoryview, write: Callable[[memoryview], int]) -> None:
    """Write all bytes, continuing after short writes.

    Raises:
        OSError: raised by the file system; EIO if it accepts no more bytes without an error.
    """
    stalled = 0
    while len(view):
        try:
            written = call("write", str(path), partial(write, view))
        except InterruptedError:  # a signal before anything was written; some mounted file systems let it through
            continue
        stalled = 0 if written else stalled + 1
        if stalled == _RETRIES:
            raise OSError(errno.EIO, "the file system accepts no more bytes and gives no reason")
        view = view[written:]


def open_regular(path: Path, *, follow: bool) -> int:
    """Open a regular file for reading; returns a descriptor.

    A checkpoint may be untrusted: a symbolic link would lead out of its directory, and opening a FIFO would block.

    Raises:
        CheckpointCorruptError: something other than a regular file is there.
        OSError: it cannot be opened; FileNotFoundError if it does not exist.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link; a socket
            raise CheckpointCorruptError(f"{path} is not a regular file; it is not read") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointCorruptError(f"{path} is not a regular file; it is not read")
    return fd


def _mode_of(path: Path) -> int | None:
    """The mode of a file; None if it is absent. `Path.exists` takes every error for an absence on Python 3.14."""
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # ELOOP: links that lead nowhere
            return None
        raise


def _leftovers_in(directory: Path) -> list[Path]:
    """The temporary directories of any process that hold only files of a save: other programs may use such names."""
    found = []
    for entry in directory.iterdir():
        with suppress(FileNotFoundError, PermissionError):  # removed in the meantime, or another user's
            if is_leftover(entry.name) and entry.is_dir() and all(_FILES.fullmatch(f.name) for f in entry.iterdir()):
                found.append(entry)
    return sorted(found)


def _writer_of(directory: Path, now: float) -> str | None:
    """Who may still write to a temporary directory, at the time `now` by the clock of the file system."""
    if directory.name.startswith(_DELETING):
        return None
    changes = [directory.lstat().st_mtime]
    lease = b""
    for entry in directory.iterdir():
        with suppress(FileNotFoundError):
            changes.append(entry.lstat().st_mtime)
    with suppress(FileNotFoundError, CheckpointCorruptError):
        lease = Directory(directory).read(LEASE)
    return holder_of(lease, directory.name, now - max(changes))
