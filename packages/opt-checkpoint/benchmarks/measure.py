"""Comparisons within one run: contenders take turns, and the ratios of their medians are reported."""

from __future__ import annotations

import json
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from opt_checkpoint.disk import checksums


def interleaved(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median seconds of each contender: one warm-up round, then `rounds` rounds, each in the reverse order of the last.

    Args:
        contenders: each does its work once and returns the seconds that count.
        rounds: how often each is measured.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for number in range(rounds + 1):
        for name in order:
            seconds = contenders[name]()
            if number:
                times[name].append(seconds)
        order = order[1:] + order[:1]
    return {name: statistics.median(values) for name, values in times.items()}


def timed(work: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


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
        "crc32": checksums._crc32.__module__,
    }
    about = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "load": round(os.getloadavg()[0], 1)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "machine": machine, "setup": setup, "figures": figures}, indent=1) + "\n")


class PeakMemory:
    """Watch `resident_bytes` during a block. `extra` is the highest increase over its start."""

    def __enter__(self) -> PeakMemory:
        self._start, self.extra, self._stop = resident_bytes(), 0, threading.Event()
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
