"""A thread that computes CRC-32 checksums in order.

It is not a `ThreadPoolExecutor`, which accepts no work once the interpreter shuts down; a background save must still
finish then.
"""

from __future__ import annotations

from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import NamedTuple

from opt_checkpoint.disk.checksums import PieceSums


class _Job(NamedTuple):
    piece: memoryview
    sums: PieceSums
    done: Future[None]


class Hasher:
    """Hashes pieces of memory one after another, during a `with` block."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="opt-checkpoint-crc")

    def __enter__(self) -> Hasher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.put(None)
        self._thread.join()

    def submit(self, piece: memoryview, sums: PieceSums) -> Future[None]:
        """Add a piece to `sums`; the memory may not change until the future is done."""
        job = _Job(piece, sums, Future())
        self._jobs.put(job)
        return job.done

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.sums.add(job.piece)
            job.done.set_result(None)
