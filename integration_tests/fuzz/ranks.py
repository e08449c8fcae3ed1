"""Ranks as threads, with collectives that deliver late, and as gloo processes; a group for every axis of a grid."""

import traceback
from collections.abc import Callable
from datetime import timedelta
from threading import BrokenBarrierError
from typing import Any, NamedTuple

import processes
import torch
import torch.distributed as dist
from torch import Tensor

from fuzz.cases import Grid, Place
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Comm, Op, ProcessGroups, Roles
from opt_distributed.comm.collectives import DONE, Pending, Sizes
from opt_distributed.comm.threads import ThreadComm, World

TIMEOUT_S = 60.0


class Failed(NamedTuple):
    """The exception that a rank raised, as it can be sent between processes and printed."""

    kind: str
    text: str
    where: str = ""  # the last lines of the traceback
    is_consequence: bool = False  # of another rank's failure
    is_refusal: bool = False  # a ValueError

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        last = reversed(traceback.extract_tb(error.__traceback__)[-4:])
        where = " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in last)
        return cls(type(error).__name__, str(error), where, _is_consequence(error), isinstance(error, ValueError))

    def __str__(self) -> str:
        return f"{self.kind}: {self.text} ({self.where})"


def _is_consequence(error: BaseException | None) -> bool:
    """Whether it only reports a barrier or a connection that another rank broke."""
    if error is None:
        return False
    is_lost = isinstance(error, BrokenBarrierError) or "onnection closed by peer" in str(error)
    return is_lost or _is_consequence(error.__cause__)


def keys_of(grid: Grid) -> dict[str, Callable[[Place], Any]]:
    """Megatron-Core's roles of process groups; ranks of equal keys are one group."""
    shards = grid.dp // grid.instances
    return {
        "dp": lambda p: (p.stage, p.tp, p.replica % grid.cp),
        "dp_cp": lambda p: (p.stage, p.tp),
        "cp": lambda p: (p.stage, p.tp, p.replica // grid.cp),
        "expt_dp": lambda p: (p.stage, p.ep, p.etp),
        "mp": lambda p: p.replica,
        "tp_ep_pp": lambda p: p.expert_replica,
        "tp": lambda p: (p.stage, p.replica),
        "expt_tp": lambda p: (p.stage, p.ep, p.expert_replica),
        "embd": lambda p: (p.tp, p.replica, "ends" if p.stage in (0, grid.pp - 1) else p.stage),
        "pp": lambda p: (p.tp, p.replica),
        "ep": lambda p: (p.stage, p.etp, p.expert_replica),
        "intra_dist_opt": lambda p: p.instance,
        "intra_dp_cp": lambda p: (p.stage, p.tp, p.instance),
        "intra_expt_dp": lambda p: (p.stage, p.ep, p.etp, p.instance),
        "inter_dist_opt": lambda p: (p.stage, p.tp, p.replica % shards),
    }


def members_of(grid: Grid, role: str) -> list[list[int]]:
    """The groups of a role, in the order in which every rank makes them."""
    key, found = keys_of(grid)[role], {}
    for rank, place in enumerate(grid.places()):
        found.setdefault(key(place), []).append(rank)
    return list(found.values())


# --- processes --------------------------------------------------------------------------------------------------------


def run_processes(size: int, rank_main: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the result of `rank_main(*args)` on each of `size` ranks of a new world, `Failed` where it raised."""
    try:
        results = processes.run_processes(size, _or_failed, rank_main, args, reuse=True)
    except processes.RankError as error:
        return [Failed(kind="RankError", text=str(error))] * size
    if any(isinstance(result, Failed) for result in results):  # a collective may still be under way
        processes.close_workers()
    return results


def _or_failed(rank_main: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return rank_main(*args)
    except Exception as error:
        return Failed.of(error)


def process_groups(grid: Grid, rank: int) -> ProcessGroups:
    """The groups of a grid. A group of one rank is None."""
    mine: dict[str, Any] = {}
    for role in keys_of(grid):
        for members in members_of(grid, role):
            timeout = timedelta(seconds=processes.TIMEOUT_S)
            group = dist.new_group(members, timeout=timeout) if len(members) > 1 else None
            if rank in members:
                mine[role] = group
    return ProcessGroups(**mine)


# --- threads ----------------------------------------------------------------------------------------------------------


class ThreadGroups:
    def __init__(self, grid: Grid, *, late: bool):
        self.grid = grid
        self.worlds: list[World] = []
        roles = ("tp", "expt_tp", "embd", "pp", "ep")
        roles += ("intra_dist_opt", "intra_dp_cp", "intra_expt_dp", "inter_dist_opt")
        self._comms = {role: self._made(members_of(grid, role), late) for role in roles}
        self._comms["everyone"] = self._made([list(range(grid.size))], late)

    def _made(self, groups: list[list[int]], late: bool) -> dict[int, Comm]:
        found: dict[int, Comm] = {}
        for members in groups:
            if len(members) == 1:
                found[members[0]] = Alone()
                continue
            self.worlds.append(World(len(members), timeout_s=TIMEOUT_S))
            for rank, comm in zip(members, self.worlds[-1].comms(), strict=True):
                found[rank] = LateComm(comm) if late else comm
        return found

    def abort(self) -> None:
        for world in self.worlds:
            world.barrier.abort()

    def roles(self, rank: int) -> Roles:
        """The groups as the step takes them; `embedding` holds the first and the last stage of the rank's pipeline."""
        of = {role: comms[rank] for role, comms in self._comms.items()}
        return Roles(
            dense=Axes(dp=of["intra_dp_cp"], tp=of["tp"], inter=of["inter_dist_opt"]),
            expert=Axes(dp=of["intra_expt_dp"], tp=of["expt_tp"], inter=of["inter_dist_opt"]),
            everyone=of["everyone"],
            instance=of["intra_dist_opt"] if self.grid.instances > 1 else None,
            embedding=of["embd"],
            ep=of["ep"],
            pp=of["pp"],
        )


class LateComm:
    """A `Comm` whose asynchronous collectives write their result when awaited; until then it reads as NaN."""

    def __init__(self, inner: ThreadComm):
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.broadcast_, self.allocate, self.gather_objects = inner.broadcast_, inner.allocate, inner.gather_objects

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        result = x.detach().clone() if async_op else x
        self.inner.all_reduce_(result, op=op)
        return _Delivery(x, result) if async_op else DONE

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        result = torch.empty_like(shard)
        self.inner.reduce_scatter_(result, full)
        _poison_(full)  # what is left there is undefined
        shard.copy_(result)
        return _Delivery(shard, result) if async_op else DONE

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        result = torch.empty_like(full) if async_op else full
        self.inner.all_gather_(result, shard)
        if not async_op:
            return DONE
        kept, pending = shard.detach().clone(), _Delivery(full, result)
        shard.copy_(kept)  # a rank's own part stays readable while it is sent
        return pending

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        result = torch.empty_like(out) if async_op else out
        self.inner.all_to_all_(result, x, sizes=sizes)
        return _Delivery(out, result) if async_op else DONE


class _Delivery:
    def __init__(self, target: Tensor, result: Tensor):
        self.target, self.result, self.has_arrived = target, result, False
        _poison_(target)

    @torch.no_grad()
    def wait(self) -> None:
        if not self.has_arrived:
            self.target.copy_(self.result)
            self.has_arrived = True


@torch.no_grad()
def _poison_(x: Tensor) -> None:
    if x.is_floating_point():
        x.fill_(torch.nan)


def run_ranks(grid: Grid, rank_main: Callable[[int, Roles], Any], *, late: bool, patient: bool) -> list[Any]:
    """The result of `rank_main` on each rank, `Failed` where it raised.

    A rank that fails stops the others. If `patient`, one that refuses does not, since every rank has to by itself.
    """
    groups = ThreadGroups(grid, late=late)

    def run(comm: ThreadComm) -> Any:
        try:
            return rank_main(comm.rank, groups.roles(comm.rank))
        except Exception as error:
            failed = Failed.of(error)
            if not (patient and failed.is_refusal):
                groups.abort()
            return failed

    try:
        return run_threads(grid.size, run)
    except TimeoutError as error:
        return [Failed(kind="TimeoutError", text=str(error))] * grid.size
    finally:
        groups.abort()
