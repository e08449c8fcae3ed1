"""Ranks as threads of one process, with the same collectives: for tests and to try layouts out."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from opt_distributed.comm.collectives import DONE, Comm, Op, Pending, Sizes

TIMEOUT_S = 300.0  # for a rank that waits for another, which may compile sweeps


class World:
    """The shared state of the ranks of one world of threads."""

    def __init__(self, size: int, *, timeout_s: float = TIMEOUT_S):
        self.size = size
        self.timeout_s = timeout_s
        self.box: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def comms(self) -> list["ThreadComm"]:
        return [ThreadComm(self, rank) for rank in range(self.size)]


class ThreadComm(Comm):
    """One rank's view of a `World`. Sums are computed in rank order, so that results do not depend on timing."""

    def __init__(self, world: World, rank: int):
        self._world = world
        self.rank = rank
        self.size = world.size

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        parts = torch.stack(self._everyone(x))
        x.copy_(parts.sum(0) if op is Op.SUM else parts.amax(0))
        return DONE

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        own = slice(self.rank * shard.numel(), (self.rank + 1) * shard.numel())
        shard.copy_(torch.stack([part[own] for part in self._everyone(full)]).sum(0))
        return DONE

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        full.copy_(torch.cat(self._everyone(shard)))
        return DONE

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        sent = [x.numel() // self.size] * self.size if sizes is None else list(sizes.sent)
        per_rank = self._exchange(torch.split(x.detach().clone(), sent))
        out.copy_(torch.cat([parts[self.rank] for parts in per_rank]))
        return DONE

    def broadcast_(self, x: Tensor, *, src: int = 0) -> None:
        x.copy_(self._everyone(x)[src])

    def gather_objects(self, value: Any) -> list[Any]:
        return self._exchange(value)

    def _everyone(self, x: Tensor) -> list[Tensor]:
        return self._exchange(x.detach().clone())

    def _exchange(self, value: Any) -> list[Any]:
        world = self._world
        world.box[self.rank] = value
        world.barrier.wait(world.timeout_s)
        values = list(world.box)
        world.barrier.wait(world.timeout_s)  # no rank may overwrite the box before all have read it
        return values


def run_threads(size: int, rank_main: Callable[[ThreadComm], Any]) -> list[Any]:
    """Run `rank_main` once per rank, and return the results in rank order, or raise the first rank's error.

    A rank that raises breaks the barrier, so that the others stop instead of waiting for it. The errors that follow
    from the broken barrier are not the ones that are raised.
    """
    world = World(size)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(comm: ThreadComm) -> None:
        try:
            results[comm.rank] = rank_main(comm)
        except BaseException as error:
            errors[comm.rank] = error
            world.barrier.abort()

    threads = [threading.Thread(target=run, args=(comm,), daemon=True) for comm in world.comms()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(world.timeout_s)
    raised = [e for e in errors if e is not None]
    causes = [e for e in raised if not _is_consequence(e)]
    for error in causes or raised:
        raise error
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"a rank of {size} was still running after {world.timeout_s} s")
    return results


def _is_consequence(error: BaseException | None) -> bool:
    """Whether an error is about a barrier that another rank broke, or was raised from such an error."""
    return error is not None and (isinstance(error, threading.BrokenBarrierError) or _is_consequence(error.__cause__))
