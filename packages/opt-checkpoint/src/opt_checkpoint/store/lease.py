"""Leases: which process may still write to the files of a save that was not committed.

A folder that is written to holds a small file that names the process, and that the process renews every half minute.
Another save may remove the folder only when the process is known to be gone, or when its lease has not been renewed for
ten minutes.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, get_type_hints

LEASE = "lease.json"
RENEW_S = 30.0
EXPIRED_S = 600.0


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
        """Return this process."""
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


class Lease:
    """This process writes to a folder, from `start` until `release`.

    Args:
        folder: name of the folder.
        target: name of the checkpoint, for people.
        renew: sets the modification time of the lease's file to now, given its content.
    """

    def __init__(self, folder: str, target: str, renew: Callable[[bytes], object]) -> None:
        self._content = json.dumps({"target": target, **Process.this()._asdict()}).encode()
        self._name = _base_name(folder)
        self._renew = renew
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"opt-checkpoint lease {self._name}", daemon=True)

    def start(self, create: Callable[[bytes], object]) -> None:
        """Write the file of the lease by `create`, and renew it from now on."""
        _held[self._name] = self  # before there is a file: another save of this process may find it at once
        try:
            create(self._content)
        except BaseException:
            del _held[self._name]
            raise
        with suppress(RuntimeError):  # Python 3.12.0 to 3.12.2 start no thread once the script has ended
            self._thread.start()  # without it, each write to the folder still counts as a renewal

    def _keep(self) -> None:
        while not self._stopped.wait(RENEW_S):
            with suppress(OSError):  # the save itself will raise the same error
                self._renew(self._content)

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()


_held: dict[str, Lease] = {}  # by name of the folder: those that this process may still write to


def stop_renewing(folder: str) -> None:
    """Stop renewing a lease, so that its file can be removed. The folder is still written to."""
    _held[_base_name(folder)].stop()


def release(folder: str) -> None:
    """End the lease of a folder, if there is one. It has its final name, or nothing in it is needed."""
    name = _base_name(folder)
    if name in _held:
        _held[name].stop()
        del _held[name]


def _base_name(folder: str) -> str:
    return folder.rpartition("/")[2]


def holder_of(lease: bytes, folder: str, age: float) -> str | None:
    """Return who may still write to a folder; None if certainly no process does.

    Args:
        lease: the content of its lease; empty if there is none.
        folder: name of the folder.
        age: seconds since the last change in it.
    """
    if _base_name(folder) in _held:
        return "this process"
    process = None
    with suppress(ValueError, KeyError, TypeError):  # damaged, as after a power loss
        content = json.loads(lease)
        process = Process(*(kind(content[name]) for name, kind in get_type_hints(Process).items()))
    if process is not None and process.boot and (process.boot, process.namespace) == _machine():
        if process.pid == os.getpid():
            return None
        return f"process {process.pid} on this machine" if _start_of(process.pid) == process.started else None
    if age > EXPIRED_S:
        return None
    who = f"process {process.pid} on {process.host}" if process is not None else "an unknown process"
    return f"{who}, which wrote {max(0.0, age):.0f} s ago"
