"""Runs a sweep on torch's own threads.

The OpenMP threads of torch wait for work by spinning, so any other thread would compete with them for processors. The
sweep therefore runs on these threads: GNU OpenMP, which torch loads into the process, starts a team by a plain
function. With another OpenMP (macOS) a pool of Python threads runs the sweep; library calls release the GIL. A process
that was forked after this package was imported uses that pool too: GNU OpenMP would wait there for threads that exist
only in the parent.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64, c_void_p
from functools import cache, lru_cache
from typing import Any

import torch

from opt_kernels.fork import is_forked

SHARES_PER_THREAD = 4  # so that other threads can take shares from a delayed one


class SweepTask(ctypes.Structure):
    """`struct Task` of elements.h: the arguments and the progress of a sweep."""

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
    """Sweep range(total) of the runs in the table, in shares of at least `least`. Returns the sum of the results of all
    shares. `table` and `extra` are addresses, in the form that `library` expects."""
    threads = max(1, min(torch.get_num_threads(), total // least))
    shares = 1 if threads == 1 else min(threads * SHARES_PER_THREAD, total // least)
    task = SweepTask(table, num_runs, extra, total, shares, 0, 0)
    work = library.work
    work.argtypes = (c_void_p,)
    work.restype = None
    if threads == 1:
        work(ctypes.addressof(task))
    else:
        _team()(work, ctypes.addressof(task), threads)
    return int(task.result)


def _team() -> Callable[[Any, int, int], None]:
    """A function that runs a callable on a number of threads."""
    return _python_team if is_forked() else _torchs_team()


@cache
def _torchs_team() -> Callable[[Any, int, int], None]:
    # `GOMP_parallel` is what compilers call for `#pragma omp parallel`. It is called here, and not by sweeps that are
    # compiled with -fopenmp: these would need an OpenMP library to link to, perhaps another one than torch's, whose
    # threads would then compete with torch's. `CDLL(None)` finds it among the symbols that the process has loaded.
    try:
        start = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return _python_team
    start.argtypes = (c_void_p, c_void_p, ctypes.c_uint, ctypes.c_uint)
    start.restype = None
    return lambda work, task, threads: start(ctypes.cast(work, c_void_p), task, threads, 0)


def _python_team(work: Any, task: int, threads: int) -> None:
    pool = _pool(os.getpid(), threads - 1)
    others = [pool.submit(work, task) for _ in range(threads - 1)]
    work(task)
    for other in others:
        other.result()


@lru_cache(maxsize=4)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """One pool per process, because a forked process does not have its parent's threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="opt-kernels")
