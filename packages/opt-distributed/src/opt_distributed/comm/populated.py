"""Groups by default, where some ranks hold no parameter: the others share the step, these join its totals."""

import torch.distributed as dist

from opt_distributed.comm.collectives import Alone, comm_of
from opt_distributed.comm.groups import Axes, Roles, roles_of


def roles_of_world(*, has_params: bool) -> Roles:
    """The groups when nobody names any: all ranks that hold parameters are data parallel. Every rank calls it once.

    A rank that holds none is by itself: it has nothing to reduce or to update, and brings zeros to the statistics that
    everyone sums, so that its step has the same result. Where all ranks hold parameters, or none does, the whole world
    is data parallel.
    """
    roles = roles_of(None, sharded=False)
    world = roles.everyone
    members = [rank for rank, has in enumerate(world.gather_objects(has_params)) if has]
    if len(members) in (0, world.size):
        return roles
    group = dist.new_group(members)  # every rank calls it, whether it belongs or not
    axes = Axes(dp=comm_of(group) if has_params else Alone(), tp=Alone())
    return Roles(dense=axes, expert=axes, everyone=world)
