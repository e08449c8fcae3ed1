"""Ranks as threads of one process, with the same collectives: for tests and to try layouts out."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opt_distributed.comm import notices
from opt_distributed.comm.collectives import DONE, Comm, Op, Pending, Sizes
from opt_distributed.comm.notices import RESTART, STAYS, Left, Tells

TIMEOUT_S = 300.0  # for a rank that waits for another, which may compile sweeps


class World:
    """The shared state of the ranks of one world of threads."""

    def __init__(self, size: int, *, timeout_s: float = TIMEOUT_S):
        self.size = size
        self.timeout_s = timeout_s
        self.box: list[Any] = [None] * size
        self.left = [STAYS] * size  # by rank: why it will not come
        self.parts: dict[tuple[int, ...], World] = {}  # by their ranks
        self._turn = threading.Condition()
        self._num_here = self._num_meetings = 0
        self._is_broken = False

    def comms(self) -> list["ThreadComm"]:
        return [ThreadComm(self, rank) for rank in range(self.size)]

    def meet(self) -> None:
        """Wait for all ranks.

        Raises CollectiveError if one of them will not come, BrokenBarrierError if that was raised on another rank, a
        rank has raised out of `run_threads`, or the timeout has passed. From then on no rank can meet others.
        """
        with self._turn:
            number = self._num_meetings
            deadline = time.monotonic() + self.timeout_s
            self._num_here += 1
            if self._num_here == self.size and not self._is_broken:
                self._num_here = 0
                self._num_meetings += 1
                self._turn.notify_all()
            while self._num_meetings == number:
                if self._is_broken or time.monotonic() > deadline:
                    self._break()
                    raise threading.BrokenBarrierError
                if self._turn.wait(notices.PATIENCE_SECONDS):
                    continue
                for rank, left in enumerate(self.left):
                    if self._num_meetings == number and left.concerns_this_place():
                        self._break()
                        raise notices.CollectiveError(f"rank {rank} {left.why}; {RESTART}")

    def abort(self) -> None:
        """Let every rank that waits, or will wait, raise BrokenBarrierError."""
        with self._turn:
            self._break()
        for part in list(self.parts.values()):
            part.abort()

    def _break(self) -> None:
        self._is_broken = True
        self._turn.notify_all()


class ThreadComm(Comm, Tells):
    """One rank's view of a `World`. Sums are computed in rank order, so that results do not depend on timing."""

    def __init__(self, world: World, rank: int):
        self._world = world
        self.rank = rank
        self.size = world.size

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        parts = torch.stack(self._everyone(x, "all_reduce"))
        x.copy_(parts.sum(0) if op is Op.SUM else parts.amax(0))
        return DONE

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        own = slice(self.rank * shard.numel(), (self.rank + 1) * shard.numel())
        parts = [part[own] for part in self._everyone(full, "reduce_scatter")]
        shard.copy_(torch.stack(parts).sum(0))
        return DONE

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        full.copy_(torch.cat(self._everyone(shard, "all_gather")))
        return DONE

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        sent = sizes.sent if sizes is not None else [x.numel() // self.size] * self.size
        parts = torch.split(x.detach().clone(), list(sent))
        per_rank = self._exchange(parts, "all_to_all")
        out.copy_(torch.cat([parts[self.rank] for parts in per_rank]))
        return DONE

    def broadcast_(self, x: Tensor, *, src: int = 0) -> None:
        x.copy_(self._everyone(x, "broadcast")[src])

    def gather_objects(self, value: Any) -> list[Any]:
        return self._exchange(value, "gather_objects")

    def part(self, ranks: Sequence[int]) -> Comm:
        key = tuple(ranks)
        world = self._world.parts.setdefault(key, World(len(key), timeout_s=self._world.timeout_s))
        return ThreadComm(world, key.index(self.rank))

    def tell(self, why: str, *, place: str = "") -> None:
        self._world.left[self.rank] = Left(why, place)

    def _everyone(self, x: Tensor, kind: str) -> list[Tensor]:
        return self._exchange(x.detach().clone(), f"{kind} {x.numel()}")

    def _exchange(self, value: Any, kind: str) -> list[Any]:
        """The value of each rank. Raises CollectiveError, on every rank, if one of them calls another `kind`."""
        world = self._world
        world.box[self.rank] = (kind, notices.here(), value)
        world.meet()
        messages = list(world.box)
        world.meet()  # no rank may overwrite the box before all have read it
        for rank, (other, place, _) in enumerate(messages):
            if other != kind:
                raise notices.CollectiveError(f"rank {rank} waits in {place or other}; {RESTART}")
        return [value for _, _, value in messages]


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
            world.abort()

    threads = [threading.Thread(target=run, args=(comm,), daemon=True) for comm in world.comms()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(world.timeout_s)
    raised = [error for error in errors if error is not None]
    if raised:
        raise min(raised, key=_is_consequence)  # the first cause, else the first consequence
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"a rank of {size} was still running after {world.timeout_s} s")
    return results


def _is_consequence(error: BaseException | None) -> bool:
    """Whether an error is about a barrier that another rank broke, or was raised from such an error."""
    return error is not None and (isinstance(error, threading.BrokenBarrierError) or _is_consequence(error.__cause__))
