"""Saves in the background that nothing has waited for when the process ends.

Their threads are no daemons: Python joins them before it calls exit handlers, and `multiprocessing` calls finalizers at
the end of a child. There, each failure that no call has raised is printed, and the exit status becomes 1 instead of 0.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from threading import Event, Thread
from weakref import WeakSet

_LAST = -1000  # priority among the finalizers of a child, which may wait for saves too
_threads = WeakSet[Thread]()
# By the event that is set when the save has finished: its handle would keep its memory.
_failures: dict[Event, str] = {}
_finalizer: Finalize | None = None


def watch(thread: Thread) -> None:
    """Note that a thread saves."""
    global _finalizer
    _threads.add(thread)
    if parent_process() is not None and (_finalizer is None or not _finalizer.still_active()):
        _finalizer = Finalize(None, _report, kwargs={"in_child": True}, exitpriority=_LAST)


def add(finished: Event, failure: str) -> None:
    """Note that a save has failed, before its event is set; with one line that describes the failure."""
    _failures[finished] = failure


def discard(finished: Event) -> None:
    """Note that a call has raised the failure of a save."""
    _failures.pop(finished, None)


def _forget() -> None:
    """Forget all saves, in a forked process, which has none of their threads."""
    _threads.clear()
    _failures.clear()


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _report(*, in_child: bool = False) -> None:
    """Wait for all saves, and print each failure, once."""
    for thread in list(_threads):
        thread.join()
    failures = list(_failures.values())
    _failures.clear()
    if failures:
        _replace_status_zero()
        if in_child:  # a forked process of `multiprocessing` calls no handlers of glibc: it ends by `os._exit`
            end = os._exit
            os._exit = lambda status: end(status or 1)
        for failure in failures:
            print(failure, file=sys.stderr, flush=True)


def _replace_status_zero() -> None:
    """Make the process end with status 1 instead of 0, after everything else; any other status stays.

    Python tells no handler the status, which an exception or `SystemExit` may have set. glibc passes it to the handlers
    that it calls at the very end, as the second argument. So `execv` gets the status in place of its list of
    arguments: a null pointer is allowed, and the process becomes `false`, which ends with status 1; of any other
    address it returns an error, and the process ends as it would have.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.__cxa_atexit(libc.execv, ctypes.c_char_p(_FALSE), None)
        libc.__cxa_atexit(libc.fflush, None, None)  # called before it: the output of C code


_FALSE = b"/bin/false"  # lives as long as the process
