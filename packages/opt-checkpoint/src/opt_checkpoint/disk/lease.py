"""Temporary directories of saves and deletions: their names, their writers, and the removal of abandoned ones.

A save writes to `.opt-checkpoint-tmp-<id>` in the directory of its target, and a deletion first renames to
`.opt-checkpoint-deleting-<id>`. A temporary directory of a save holds a lease: a small file that says which process
writes there, and whose modification time that process renews every half minute. Another save may remove the directory
only when the process is known to be gone, or when the lease has not been renewed for ten minutes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import uuid
from pathlib import Path
from typing import NamedTuple, Protocol

from opt_checkpoint.disk.data_file import read_small_file
from opt_checkpoint.disk.files import Files, discard, write_all
from opt_checkpoint.errors import CheckpointCorruptError

logger = logging.getLogger(__name__)
LEASE = "lease.json"
RENEW_S, EXPIRED_S = 30.0, 600.0
_ID = "[0-9a-f]{32}"
# The second form is that of format 1.
_TEMPORARY = re.compile(rf"\.opt-checkpoint-(?:tmp|deleting)-{_ID}|.+?(?:\.(?:tmp|deleting)-{_ID})+")
_DELETING = re.compile(rf"\.opt-checkpoint-deleting-{_ID}|.+\.deleting-{_ID}")

_FILES = re.compile(
    r"__\d+_\d+\.distcp|manifest\.(?:bin|json)|metadata\.json|\.metadata|lease\.json|"
    r"model(?:-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)


def is_leftover(name: str) -> bool:
    """Whether a directory has the name of a temporary directory of a save or deletion."""
    return _TEMPORARY.fullmatch(name) is not None


class Process(NamedTuple):
    """A process, identified uniquely.

    Args:
        host: the machine's name, for people.
        boot: identifies the machine and its last boot.
        namespace: the namespace in which `pid` counts.
        pid: the process.
        started: when it started, in the kernel's ticks; another process may get its number later.
    """

    host: str
    boot: str
    namespace: int
    pid: int
    started: str

    @classmethod
    def this(cls) -> Process:
        """This process."""
        boot, namespace = _machine()
        return cls(socket.gethostname(), boot, namespace, os.getpid(), _start_of(os.getpid()) or "")


def _machine() -> tuple[str, int]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # not Linux: leases expire by time alone
        return "", 0


def _start_of(pid: int) -> str | None:
    """Return when a process started; None if it does not exist, or on systems without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


class LeaseFile(Protocol):
    """The file or object of a lease."""

    def create(self, content: bytes) -> None:
        """Create it."""

    def renew(self) -> None:
        """Set its modification time to now."""

    def renewed(self) -> float:
        """Its modification time, by the clock of the file system or store."""


class _DirectoryLease(NamedTuple):
    """The lease on an existing temporary directory."""

    files: Files
    path: Path

    def create(self, content: bytes) -> None:
        fd = self.files.create(self.path)
        try:
            write_all(self.files, fd, content)
        finally:
            self.files.close(fd)

    def renew(self) -> None:
        self.files.touch(self.path)

    def renewed(self) -> float:
        return self.path.stat().st_mtime


class Lease:
    """This process writes to a temporary place, until `release`.

    Args:
        file: where the lease is written.
        place: name of the temporary place.
        target: name of the checkpoint, for people.
    """

    def __init__(self, file: LeaseFile, place: str, target: str) -> None:
        self._file = file
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name=_thread_name(place), daemon=True)
        file.create(json.dumps({"target": target, **Process.this()._asdict()}).encode())
        self._thread.start()

    @classmethod
    def in_directory(cls, files: Files, directory: Path, target: str) -> Lease:
        """A lease on an existing temporary directory."""
        return cls(_DirectoryLease(files, directory / LEASE), directory.name, target)

    @property
    def renewed(self) -> float:
        """When the lease was last renewed, by the clock of the file system."""
        return self._file.renewed()

    def _renew(self) -> None:
        while not self._released.wait(RENEW_S):
            try:
                self._file.renew()
            except OSError:  # the save itself will raise the same error
                continue

    def release(self) -> None:
        """Stop renewing."""
        self._released.set()
        self._thread.join()


def _thread_name(place: str) -> str:
    return f"opt-checkpoint lease {place}"


def writer_of(directory: Path, now: float) -> str | None:
    """Who may still write to a temporary directory; None if certainly no process does.

    Args:
        directory: one for whose name `is_leftover` is true.
        now: the time, by the clock of the file system.

    Raises:
        OSError: the directory cannot be read.
    """
    if _DELETING.fullmatch(directory.name):
        return None
    return holder_of(_read_lease(directory), directory.name, now - _last_change(directory))


def holder_of(held: Process | None, place: str, age: float) -> str | None:
    """Who may still write to a temporary place; None if certainly no process does.

    Args:
        held: the process named in the lease, if there is one.
        place: name of the temporary place.
        age: seconds since the last change in it.
    """
    if held is not None and held.boot and (held.boot, held.namespace) == _machine():
        return _running(held, place)
    if age > EXPIRED_S:
        return None
    who = f"process {held.pid} on {held.host}" if held is not None else "an unknown process"
    return f"{who}, which wrote {max(0.0, age):.0f} s ago"


def _running(process: Process, place: str) -> str | None:
    """A description of a process of this machine if it is still running, else None."""
    if process.pid == os.getpid():
        names = {thread.name for thread in threading.enumerate()}
        return "this process" if _thread_name(place) in names else None
    return f"process {process.pid} on this machine" if _start_of(process.pid) == process.started else None


def _read_lease(directory: Path) -> Process | None:
    """Return the process that holds the lease; None if the lease is missing or unreadable, as after a power loss."""
    try:
        return process_in(read_small_file(directory / LEASE))
    except (FileNotFoundError, CheckpointCorruptError):
        return None


def process_in(raw: bytes) -> Process | None:
    """The process named in the content of a lease; None if it is damaged."""
    try:
        content = json.loads(raw)
        host, boot, namespace, pid, started = (content[name] for name in Process._fields)
        return Process(str(host), str(boot), int(namespace), int(pid), str(started))
    except (ValueError, KeyError, TypeError):
        return None


def _last_change(directory: Path) -> float:
    changes = [directory.lstat().st_mtime]
    for entry in directory.iterdir():
        try:
            changes.append(entry.lstat().st_mtime)
        except FileNotFoundError:
            continue
    return max(changes)


def clock_of(files: Files, directory: Path) -> float:
    """The time by the clock of a directory's file system, which may be another machine's.

    Raises:
        OSError: no file can be written there.
    """
    probe = _DirectoryLease(files, directory / f".opt-checkpoint-clock-{uuid.uuid4().hex}")
    probe.create(b"")
    try:
        return probe.renewed()
    finally:
        files.remove(probe.path)


def leftovers(directory: Path) -> list[Path]:
    """All temporary directories in a directory, of any process."""
    return sorted(entry for entry in directory.iterdir() if is_leftover(entry.name) and _is_of_ours(entry))


def _is_of_ours(directory: Path) -> bool:
    """Whether a directory has only files that a save creates, because other programs may use similar names."""
    try:
        return directory.is_dir() and all(_FILES.fullmatch(entry.name) for entry in directory.iterdir())
    except FileNotFoundError:  # removed in the meantime
        return False


def remove_leftovers(files: Files, directory: Path, now: float) -> None:
    """Delete the temporary directories that no longer have a writer. Those that cannot be deleted remain."""
    for path in leftovers(directory):
        try:
            if writer_of(path, now) is None:
                remove_leftover(files, path)
        except FileNotFoundError:  # another process deletes it too
            continue
        except OSError as error:
            logger.warning("could not remove %s, which an interrupted save left: %s", path, error)


def remove_leftover(files: Files, path: Path) -> None:
    """Delete a temporary directory."""
    if _DELETING.fullmatch(path.name):
        files.remove_tree(path)
    else:
        discard(files, path, uuid.uuid4().hex)
