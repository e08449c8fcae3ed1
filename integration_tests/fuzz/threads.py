"""Ranks as threads, with a group for every axis of a grid, and collectives that deliver late."""

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from fuzz.cases import Grid, Place
from fuzz.failed import Failed
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Comm, Op, Roles
from opt_distributed.comm.collectives import DONE, Pending, Sizes, zeros
from opt_distributed.comm.threads import ThreadComm, World

TIMEOUT_S = 60.0


class ThreadGroups:
    """The groups of a grid of threads; each is made by whichever of its ranks asks first."""

    def __init__(self, grid: Grid, *, late: bool):
        self.grid, self.late = grid, late
        self._worlds: dict[Hashable, World] = {}
        self._lock = threading.Lock()

    def comm(self, rank: int, axis: str, key: Callable[[Place], Hashable]) -> Comm:
        """This rank's view of the group of all ranks whose place has the same `key`."""
        grid = self.grid
        mine = key(grid.place(rank))
        members = [other for other in range(grid.size) if key(grid.place(other)) == mine]
        if len(members) == 1:
            return Alone()
        with self._lock:
            world = self._worlds.setdefault((axis, mine), World(len(members), timeout_s=TIMEOUT_S))
        comm = ThreadComm(world, members.index(rank))
        return LateComm(comm) if self.late else comm

    def abort(self) -> None:
        """Stops every rank that waits for another."""
        with self._lock:
            for world in self._worlds.values():
                world.barrier.abort()

    def embedding(self, rank: int) -> Comm:
        """The first and the last stage of a rank's pipeline; the rank alone on other stages."""
        last = self.grid.pp - 1
        return self.comm(rank, "embedding", lambda p: (p.tp, p.replica, "ends" if p.stage in (0, last) else p.stage))

    def roles(self, rank: int) -> Roles:
        """The groups as the step takes them."""
        instances = self.grid.instances
        inter = self.comm(rank, "inter", lambda p: (p.stage, p.tp, p.replica % (self.grid.dp // instances)))
        return Roles(
            dense=Axes(
                dp=self.comm(rank, "dp", lambda p: (p.stage, p.tp, p.instance)),
                tp=self.comm(rank, "tp", lambda p: (p.stage, p.replica)),
                inter=inter,
            ),
            expert=Axes(
                dp=self.comm(rank, "expert dp", lambda p: (p.stage, p.ep, p.etp, p.instance)),
                tp=self.comm(rank, "expert tp", lambda p: (p.stage, p.ep, p.expert_replica)),
                inter=inter,
            ),
            everyone=self.comm(rank, "everyone", lambda p: ()),
            instance=self.comm(rank, "instance", lambda p: p.instance) if instances > 1 else None,
            embedding=self.embedding(rank),
        )


class LateComm:
    """A `Comm` whose asynchronous collectives write their result when awaited; until then it reads as NaN."""

    def __init__(self, inner: ThreadComm):
        self.inner, self.rank, self.size = inner, inner.rank, inner.size

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        if not async_op:
            return self.inner.all_reduce_(x, op=op)
        result = x.detach().clone()
        self.inner.all_reduce_(result, op=op)
        return _Delivery(x, result)

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        result = torch.empty_like(shard)
        self.inner.reduce_scatter_(result, full)
        _poison_(full)  # what is left there is undefined
        shard.copy_(result)
        return _Delivery(shard, result) if async_op else DONE

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        if not async_op:
            return self.inner.all_gather_(full, shard)
        result = torch.empty_like(full)
        self.inner.all_gather_(result, shard)
        kept = shard.detach().clone()
        pending = _Delivery(full, result)
        shard.copy_(kept)  # a rank's own part stays readable while it is sent
        return pending

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        if not async_op:
            return self.inner.all_to_all_(out, x, sizes=sizes)
        result = torch.empty_like(out)
        self.inner.all_to_all_(result, x, sizes=sizes)
        return _Delivery(out, result)

    def broadcast_(self, x: Tensor, *, src: int = 0) -> None:
        self.inner.broadcast_(x, src=src)

    def allocate(self, numel: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return zeros(numel, dtype=dtype, device=device)

    def gather_objects(self, value: Any) -> list[Any]:
        return self.inner.gather_objects(value)


class _Delivery:
    """A result on its way to `target`."""

    def __init__(self, target: Tensor, result: Tensor):
        self.target, self.result = target, result
        self.has_arrived = False
        _poison_(target)

    def wait(self) -> None:
        if not self.has_arrived:
            with torch.no_grad():
                self.target.copy_(self.result)
            self.has_arrived = True


@torch.no_grad()
def _poison_(x: Tensor) -> None:
    if x.is_floating_point():
        x.fill_(torch.nan)


def run_ranks(grid: Grid, rank_main: Callable[[int, Roles, Comm], Any], *, late: bool, patient: bool) -> list[Any]:
    """The result of `rank_main` on each rank, `Failed` where it raised.

    A rank that fails stops the others. If `patient`, one that refuses does not, since every rank has to by itself.
    """
    groups = ThreadGroups(grid, late=late)

    def run(comm: ThreadComm) -> Any:
        try:
            return rank_main(comm.rank, groups.roles(comm.rank), groups.embedding(comm.rank))
        except Exception as error:
            failed = Failed.of(error)
            if not (patient and failed.is_refusal):
                groups.abort()
            return failed

    try:
        return run_threads(grid.size, run)
    except TimeoutError as error:
        return [Failed(kind="TimeoutError", text=str(error), where="", is_consequence=False)] * grid.size
    finally:
        groups.abort()
