"""Communication: the `Comm` protocol, its implementations, process groups by role, and devices.

For packages that call collectives, or find groups of a model.
"""

from opt_distributed.comm import device, notices
from opt_distributed.comm.collectives import Alone, Comm, HostComm, Op, TorchComm, agree, agreed, group_of, members
from opt_distributed.comm.device import GraphError
from opt_distributed.comm.groups import ProcessGroupCollection, ProcessGroups, is_outside, mesh_of, replicas_outside
from opt_distributed.comm.roles import Axes, Given, Roles, find_roles, from_all_replicas, world

__all__ = [
    "Alone", "Axes", "Comm", "Given", "GraphError", "HostComm", "Op", "ProcessGroupCollection", "ProcessGroups",
    "Roles", "TorchComm", "agree", "agreed", "device", "find_roles", "from_all_replicas", "group_of", "is_outside",
    "members", "mesh_of", "notices", "replicas_outside", "world",
]  # fmt: skip
