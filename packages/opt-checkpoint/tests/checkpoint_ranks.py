"""Ranks for tests: gloo processes, and threads of this process."""

import pickle
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from processes import ByFile, run_processes

from opt_checkpoint import PlanCache, load, save
from opt_checkpoint.run.ranks import Ranks


def run_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `work(rank, size, *arguments)` on every rank of a world of processes; return the results by rank.

    The processes take part in one world after another.
    """
    return run_processes(size, _with_rank, ByFile.of(work, *arguments), reuse=True)


def _with_rank(work: ByFile) -> Any:
    return work(dist.get_rank(), dist.get_world_size())


class ThreadRanks(Ranks):
    """Ranks that are threads of this process; each has one of these, and passes it as the process group."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[bytes]) -> None:
        super().__init__(rank, size)
        vars(self).update(barrier=barrier, slots=slots)

    def gather_objects(self, value: Any) -> list[Any]:
        self.slots[self.rank] = pickle.dumps(value)
        self.barrier.wait()
        values = [pickle.loads(slot) for slot in self.slots]
        self.barrier.wait()
        return values

    def gather(self, value: Any) -> list[Any] | None:
        values = self.gather_objects(value)
        return values if self.rank == 0 else None

    def scatter(self, values: Sequence[Any] | None) -> Any:
        return self.gather_objects(values)[0][self.rank]

    def broadcast(self, value: Any) -> Any:
        return self.gather_objects(value)[0]


def on_threads(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """`work(ranks)` on ranks that are threads; by rank, what it returned or raised. A rank waits half a minute."""
    barrier = threading.Barrier(size, timeout=30)
    slots = [b""] * size
    results = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, size, barrier, slots))
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _checked(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def save_as_ranks(
    states: Sequence[Any], path: Path, *, caches: Sequence[PlanCache | None] | None = None, **options: Any
) -> None:
    """A save of as many ranks as there are states, on threads."""
    plans = caches or [None] * len(states)

    def work(ranks: Any) -> None:
        save(states[ranks.rank], path, process_group=ranks, plans=plans[ranks.rank], **options)

    _checked(on_threads(len(states), work))


def load_as_ranks(states: Sequence[Any], path: Path, **options: Any) -> list[Any]:
    """A load of as many ranks as there are states, on threads; the loaded states, by rank."""
    work = lambda ranks: load(states[ranks.rank], path, process_group=ranks, threads=1, **options).state
    return _checked(on_threads(len(states), work))


def error_on_all(size: int, work: Callable[[Any], object]) -> BaseException:
    """The error that every rank raises, with the same class and message on all of them."""
    errors = on_threads(size, work)
    assert len({(type(error), str(error)) for error in errors}) == 1, errors
    assert isinstance(errors[0], BaseException), errors[0]
    return errors[0]
