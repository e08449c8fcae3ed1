"""Groups by default, where some ranks hold no parameter: the others share the step, these hear what came of it."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from opt_distributed.comm.collectives import Alone, Comm, Op, Pending, comm_of
from opt_distributed.comm.groups import Axes, Roles, roles_of


class OneSpeaks:
    """A group in which one rank has something to say, the same that others would repeat: sums are of what it brings.

    Every rank takes part in every collective and gets its result. Reductions are sums; a maximum is refused.
    """

    def __init__(self, comm: Comm, *, speaks: bool):
        self._comm = comm
        self.speaks = speaks
        self.rank, self.size = comm.rank, comm.size

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        if op is not Op.SUM:
            raise ValueError(f"op is {op}, but silent ranks can bring a zero to a sum only; use Op.SUM")
        return self._comm.all_reduce_(self._said_(x), op=op, async_op=async_op)

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        return self._comm.reduce_scatter_(shard, self._said_(full), async_op=async_op)

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        return self._comm.all_gather_(full, shard, async_op=async_op)

    def all_to_all_(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        return self._comm.all_to_all_(out, x, async_op=async_op)

    def broadcast_(self, x: Tensor, *, src: int = 0) -> None:
        self._comm.broadcast_(x, src=src)

    def gather_objects(self, value: Any) -> list[Any]:
        return self._comm.gather_objects(value)

    def _said_(self, x: Tensor) -> Tensor:
        return x if self.speaks else x.zero_()


def roles_of_world(*, has_params: bool) -> Roles:
    """The groups when nobody names any: all ranks that hold parameters are data parallel. Every rank calls it once.

    A rank that holds none is by itself: it has nothing to reduce or to update, and hears the totals of the others
    through `mp`, so that its step has the same result. Where all ranks hold parameters, or none does, the whole world
    is data parallel.
    """
    roles = roles_of(None, sharded=False)
    world = roles.everyone
    members = [rank for rank, has in enumerate(world.gather_objects(has_params)) if has]
    if len(members) in (0, world.size):
        return roles
    group = dist.new_group(members)  # every rank calls it, whether it belongs or not
    axes = Axes(
        dp=comm_of(group) if has_params else Alone(),
        mp=OneSpeaks(world, speaks=world.rank == members[0]),
        tp=Alone(),
    )
    return Roles(dense=axes, expert=axes, everyone=world)
