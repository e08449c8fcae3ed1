"""Comparisons in adjacent pairs: a disk has two modes, so only neighbours in time are compared.

Each pair runs a contender and its base, in an order that alternates from pair to pair, with `sync` before each run.
What counts is the ratio within a pair: its median and quartiles are reported.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from opt_checkpoint.disk import data_file


class Took(NamedTuple):
    """Seconds of one run: of the clock, and of the processor in all threads."""

    wall: float
    cpu: float


class Figure(NamedTuple):
    """The lower quartile, median and upper quartile of a figure over the pairs."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Figure:
        """The quartiles of values."""
        if len(values) < 2:
            return cls(*values * 3)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, statistics.median(values), high)

    def __str__(self) -> str:
        return f"{self.median:10.3f}  [{self.low:.3f}, {self.high:.3f}]"


def timed(work: Callable[[], object]) -> Took:
    """What one call takes."""
    wall = time.perf_counter()
    cpu = time.process_time()
    work()
    return Took(time.perf_counter() - wall, time.process_time() - cpu)


def in_pairs(ours: Callable[[], Took], base: Callable[[], Took], rounds: int) -> list[tuple[Took, Took]]:
    """What a contender and its base take, pair by pair, after one pair that does not count.

    Args:
        ours: does its work once and returns what counts. It may not delete files: the disk frees blocks later.
        base: what it is compared with.
        rounds: the number of pairs.
    """
    pairs = []
    for number in range(rounds + 1):
        took = {}
        for contender in (ours, base) if number % 2 else (base, ours):
            os.sync()
            took[contender] = contender()
        if number:
            pairs.append((took[ours], took[base]))
    return pairs


def speed(pairs: list[tuple[Took, Took]], field: str = "wall") -> Figure:
    """How many times as fast as the base a contender is, by the clock or by the processor."""
    return Figure.of([getattr(base, field) / getattr(ours, field) for ours, base in pairs])


def resident_bytes() -> int:
    """Resident memory of this process, without mapped files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) * 1024


def highest_resident_bytes() -> int:
    """Highest resident memory of this process so far, mapped files included."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmHWM"].split()[0]) * 1024


def write_results(path: Path, setup: Mapping[str, object], figures: object) -> None:
    """Write figures as JSON, with the date and the kind of machine."""
    machine = {
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "crc32": vars(data_file)["_crc32"].__module__,
    }
    about = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "load": round(os.getloadavg()[0], 1)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "machine": machine, "setup": setup, "figures": figures}, indent=1) + "\n")


class PeakMemory:
    """Watch `resident_bytes` during a block. `extra` is the highest increase over its start."""

    def __enter__(self) -> PeakMemory:
        self._start = resident_bytes()
        self.extra = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.extra = max(self.extra, resident_bytes() - self._start)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def drop_cache(path: Path) -> None:
    """Ask the kernel to drop the cached pages of all files below a path, so that the next read is from the disk."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
