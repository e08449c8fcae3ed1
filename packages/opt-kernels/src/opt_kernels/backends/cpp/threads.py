"""A sweep's work spread over torch's own threads.

Threads of torch's OpenMP wait for work by spinning, and one beside them would get a busy processor. So the sweep is
handed to them: GNU OpenMP starts a team by a plain function, which torch's libraries bring into the process. Where it
is another OpenMP (macOS), a pool of Python's threads does it; library calls let go of the interpreter while they run.
So it is in a process that was forked after this package was imported: GNU OpenMP would wait there for threads that only
the parent has.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64, c_void_p
from functools import cache, lru_cache
from typing import Any

import torch

from opt_kernels.backends.cpp.fork import is_forked

SHARES_PER_THREAD = 4  # where a thread is held up, others take over


class SweepTask(ctypes.Structure):
    """`struct Task` of elements.h: a sweep's arguments, and how far it has come."""

    _fields_ = (
        ("table", c_void_p),
        ("num_runs", c_int64),
        ("extra", c_void_p),
        ("total", c_int64),
        ("num_shares", c_int64),
        ("next", c_int64),
        ("result", c_int64),
    )


def run(library: ctypes.CDLL, *, table: int, num_runs: int, extra: int, total: int, least: int) -> int:
    """Sweeps range(total) of what the table describes, in shares of at least `least`; returns the sum of what shares
    return. Addresses are of what `library` takes."""
    threads = max(1, min(torch.get_num_threads(), total // least))
    shares = 1 if threads == 1 else min(threads * SHARES_PER_THREAD, total // least)
    task = SweepTask(table, num_runs, extra, total, shares, 0, 0)
    work = library.work
    work.argtypes, work.restype = (c_void_p,), None
    if threads == 1:
        work(ctypes.addressof(task))
    else:
        _team()(work, ctypes.addressof(task), threads)
    return int(task.result)


def _team() -> Callable[[Any, int, int], None]:
    """Runs a function on so many threads."""
    return _python_team if is_forked() else _torchs_team()


@cache
def _torchs_team() -> Callable[[Any, int, int], None]:
    try:
        start = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return _python_team
    start.argtypes, start.restype = (c_void_p, c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return lambda work, task, threads: start(ctypes.cast(work, c_void_p), task, threads, 0)


def _python_team(work: Any, task: int, threads: int) -> None:
    others = [_pool(os.getpid(), threads - 1).submit(work, task) for _ in range(threads - 1)]
    work(task)
    for other in others:
        other.result()


@lru_cache(maxsize=4)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """A forked process has none of its parent's threads, hence a pool for each."""
    return ThreadPoolExecutor(threads, thread_name_prefix="opt-kernels")
