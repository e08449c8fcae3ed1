"""Grids of data-, tensor-, pipeline- and expert-parallel ranks: who is where, and a group of each role for every rank.

Groups are those of threads, whose collectives may deliver late, or of gloo processes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import processes
import torch
import torch.distributed as dist
from torch import Tensor

from opt_distributed.comm import Alone, Axes, Comm, Op, ProcessGroups, Roles
from opt_distributed.comm.collectives import DONE, Pending, Sizes
from opt_distributed.comm.threads import ThreadComm, World


class Place(NamedTuple):
    tp: int
    replica: int
    stage: int
    instance: int
    etp: int
    ep: int
    expert_replica: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Ranks by what they hold, in the order of Megatron-Core: rank = (stage * dp + replica) * tp + index within tp.

    Experts divide the `dp * tp` ranks of a stage again: expert tensor parallelism innermost, then expert parallelism,
    then replicas of the experts. Optimizer instances are consecutive replicas.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    instances: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1  # replicas that are context-parallel peers; only process groups tell them from others

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def expert_dp(self) -> int:
        """Replicas of an expert."""
        return self.dp * self.tp // (self.ep * self.etp)

    @property
    def is_possible(self) -> bool:
        per_stage = self.dp * self.tp
        return per_stage % (self.ep * self.etp) == 0 and not (
            self.dp % self.instances or self.expert_dp % self.instances
        )

    def place(self, rank: int) -> Place:
        """The coordinate of a rank on every axis."""
        outer, tp = divmod(rank, self.tp)
        stage, replica = divmod(outer, self.dp)
        expert_replica, of_expert = divmod(replica * self.tp + tp, self.etp * self.ep)
        ep, etp = divmod(of_expert, self.etp)
        return Place(tp, replica, stage, replica // (self.dp // self.instances), etp, ep, expert_replica)

    def places(self) -> list[Place]:
        return [self.place(rank) for rank in range(self.size)]

    @property
    def keys(self) -> dict[str, Callable[[Place], Any]]:
        """Megatron-Core's roles of process groups; ranks of equal keys are one group."""
        shards = self.dp // self.instances
        return {
            "dp": lambda p: (p.stage, p.tp, p.replica % self.cp),
            "dp_cp": lambda p: (p.stage, p.tp),
            "cp": lambda p: (p.stage, p.tp, p.replica // self.cp),
            "expt_dp": lambda p: (p.stage, p.ep, p.etp),
            "mp": lambda p: p.replica,
            "tp_ep_pp": lambda p: p.expert_replica,
            "tp": lambda p: (p.stage, p.replica),
            "expt_tp": lambda p: (p.stage, p.ep, p.expert_replica),
            "embd": lambda p: (p.tp, p.replica, "ends" if p.stage in (0, self.pp - 1) else p.stage),
            "pp": lambda p: (p.tp, p.replica),
            "ep": lambda p: (p.stage, p.etp, p.expert_replica),
            "intra_dist_opt": lambda p: p.instance,
            "intra_dp_cp": lambda p: (p.stage, p.tp, p.instance),
            "intra_expt_dp": lambda p: (p.stage, p.ep, p.etp, p.instance),
            "inter_dist_opt": lambda p: (p.stage, p.tp, p.replica % shards),
        }

    def members(self, role: str) -> list[list[int]]:
        """The groups of a role, in the order in which every rank makes them."""
        key = self.keys[role]
        found = {}
        for rank, place in enumerate(self.places()):
            found.setdefault(key(place), []).append(rank)
        return list(found.values())

    def __str__(self) -> str:
        axes = {name: getattr(self, name) for name in ("tp", "pp", "dp", "cp", "instances", "ep", "etp")}
        return "x".join(f"{name}{size}" for name, size in axes.items() if size > 1 or name == "dp")


def process_groups(grid: Grid, rank: int) -> ProcessGroups:
    """The groups of a rank that is a process. Collective. A group of one rank is None."""
    mine: dict[str, Any] = {}
    for role in grid.keys:
        for members in grid.members(role):
            timeout = timedelta(seconds=processes.TIMEOUT_S)
            group = dist.new_group(members, timeout=timeout) if len(members) > 1 else None
            if rank in members:
                mine[role] = group
    return ProcessGroups(**mine)


def thread_roles(grid: Grid, worlds: list[World], *, late: bool = False, timeout_s: float = 60.0) -> list[Roles]:
    """The groups of every rank, as threads. Appends to `worlds`, whose barriers a rank that fails has to break."""

    def comms(groups: Sequence[Sequence[int]]) -> list[Comm]:
        found: list[Comm] = [Alone()] * grid.size
        for members in (members for members in groups if len(members) > 1):
            worlds.append(World(len(members), timeout_s=timeout_s))
            for rank, comm in zip(members, worlds[-1].comms(), strict=True):
                found[rank] = LateComm(comm) if late else comm
        return found

    of = {role: comms(grid.members(role)) for role in grid.keys}
    everyone = comms([range(grid.size)])
    return [
        Roles(
            dense=Axes(dp=of["intra_dp_cp"][rank], tp=of["tp"][rank], inter=of["inter_dist_opt"][rank]),
            expert=Axes(dp=of["intra_expt_dp"][rank], tp=of["expt_tp"][rank], inter=of["inter_dist_opt"][rank]),
            everyone=everyone[rank],
            instance=of["intra_dist_opt"][rank] if grid.instances > 1 else None,
            ep=of["ep"][rank],
            known_peers={role: of[role][rank] for role in ("embd", "pp")},
        )
        for rank in range(grid.size)
    ]


def comms_of(groups: Sequence[Sequence[int]]) -> dict[int, ThreadComm]:
    """Each rank's communicator in the groups, which hold every rank once."""
    worlds = [(group, World(len(group)).comms()) for group in groups]
    return {rank: comm for group, comms in worlds for rank, comm in zip(group, comms, strict=True)}


class LateComm:
    """A `Comm` whose asynchronous collectives write their result when awaited; until then it reads as NaN."""

    def __init__(self, inner: ThreadComm):
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.broadcast_ = inner.broadcast_
        self.allocate = inner.allocate
        self.gather_objects = inner.gather_objects

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        result = x.detach().clone()
        self.inner.all_reduce_(result, op=op)
        return _delivered(x, result, async_op)

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        result = torch.empty_like(shard)
        self.inner.reduce_scatter_(result, full)
        _poison_(full)  # what is left there is undefined
        return _delivered(shard, result, async_op)

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        result = torch.empty_like(full)
        kept = shard.detach().clone()
        self.inner.all_gather_(result, shard)
        pending = _delivered(full, result, async_op)
        shard.copy_(kept)  # a rank's own part stays readable while it is sent
        return pending

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        result = torch.empty_like(out)
        self.inner.all_to_all_(result, x, sizes=sizes)
        return _delivered(out, result, async_op)


class _Delivery:
    def __init__(self, target: Tensor, result: Tensor):
        self.target = target
        self.result = result
        self.has_arrived = False
        _poison_(target)

    @torch.no_grad()
    def wait(self) -> None:
        if not self.has_arrived:
            self.target.copy_(self.result)
            self.has_arrived = True


def _delivered(target: Tensor, result: Tensor, async_op: bool) -> Pending:
    delivery = _Delivery(target, result)
    if async_op:
        return delivery
    delivery.wait()
    return DONE


@torch.no_grad()
def _poison_(x: Tensor) -> None:
    if x.is_floating_point():
        x.fill_(torch.nan)
