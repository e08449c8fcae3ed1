"""`ProcessGroups`: process groups by role, as the caller gives them, or from a `DeviceMesh` or Megatron-Core's state.

No other file of this package reads meshes. A mesh is interpreted through its root, the mesh that it was sliced from:
`mesh["tp"]` of a tensor-parallel plan does not describe replicas, but its root `("dp", "tp")` does.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from inspect import getattr_static
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from opt_config import did_you_mean
from opt_distributed.comm.collectives import Comm, ProcessGroupError, TorchComm, members
from opt_paramgroups import TENSOR_PARALLEL_AXES

ROLES: Mapping[str, str] = MappingProxyType(
    {
        "dp": "replicas of the dense parameters",
        "dp_cp": "the same, and context-parallel ranks; dense gradients are reduced here",
        "expt_dp": "replicas of the experts",
        "mp": "tensor and pipeline ranks that hold one copy of the dense model",
        "tp_ep_pp": "ranks that hold one copy of the experts",
        "tp": "tensor-parallel peers of a dense matrix",
        "expt_tp": "tensor-parallel peers of an expert's matrix",
        "pp": "pipeline stages",
        "cp": "context-parallel peers",
        "ep": "expert-parallel peers",
        "embd": "stages that share the word embedding",
        "pos_embd": "stages that share the position embedding",
        "intra_dist_opt": "all ranks of one optimizer instance",
        "intra_dp_cp": "dense shards of one instance",
        "intra_expt_dp": "expert shards of one instance",
        "inter_dist_opt": "the ranks that hold the same shard, one of each instance",
        "tp_cp": "tensor- and context-parallel peers; accepted, not read",
        "tp_ep": "tensor- and expert-parallel peers; accepted, not read",
        "tp_dp_cp": "tensor-, data- and context-parallel peers; accepted, not read",
    }
)


class ProcessGroups:
    """The process groups of a run, by role: `ProcessGroups(dp=..., mp=None, ...)`, or attributes set one by one.

    A role set to None stands for one rank. A role that was never set reads as None, too, but is an error if needed.
    """

    def __init__(self, **groups: dist.ProcessGroup | None):
        for role, group in groups.items():
            setattr(self, role, group)

    def __setattr__(self, role: str, group: dist.ProcessGroup | None) -> None:
        if role not in ROLES:
            raise ProcessGroupError(f"unknown role {role!r} of a process group; roles are {', '.join(ROLES)}")
        super().__setattr__(role, group)

    def __getattr__(self, role: str) -> dist.ProcessGroup | None:
        if role in ROLES:
            return None
        raise AttributeError(role)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> "ProcessGroups":
        """Return the groups of a mesh with named axes that spans the world; see `AXES`. Collective.

        Dense parameters are replicated over the data, context and expert axes, experts over the data and context axes.
        Experts are cut over the tensor axis as dense parameters are.

        Raises:
            ProcessGroupError: an axis has no name or an unknown one, or the mesh does not span the world.
        """
        root = root_of(mesh)
        if problem := mesh_problem(root):
            raise problem
        groups = cls(**{role: _along(root, *axes) for role, axes in _AXES_OF.items()})
        groups.embd = _ends_of(groups.pp)
        groups.intra_dist_opt = dist.group.WORLD
        return groups

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that were set, including those set to None."""
        return tuple(vars(self))

    def first_of(self, *roles: str) -> dist.ProcessGroup | None:
        """Return the group of the first of `roles` that was set, even to None; None if none of them was set."""
        return next((vars(self)[role] for role in roles if role in vars(self)), None)

    def require(self, *roles: str, because: str) -> None:
        """Raise ProcessGroupError if any of `roles` was never set."""
        missing = [role for role in roles if role not in vars(self)]
        if missing:
            named = "; ".join(f"{role} ({ROLES[role]})" for role in missing)
            raise ProcessGroupError(
                f"pg_collection lacks {named}: needed {because}; set a role to None if it has only one rank"
            )


ProcessGroupCollection = ProcessGroups  # Megatron-Core's name


DATA_AXES = ("dp", "dp_replicate", "dp_shard", "dp_shard_mod_ep", "dp_shard_in_ep")
AXES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(DATA_AXES, "replicas or shards of the model, which see different samples"),
        "cp": "context-parallel peers: parts of the same samples",
        "ep": "expert-parallel peers: other experts, different samples",
        "tp": "tensor-parallel peers: parts of the same matrices, the same samples",
        "pp": "pipeline stages",
    }
)
"""The known names of mesh axes, and their meaning."""
_AXES_OF = {
    "dp": (*DATA_AXES, "ep"),
    "dp_cp": (*DATA_AXES, "ep", "cp"),
    "expt_dp": (*DATA_AXES, "cp"),
    "mp": ("tp", "pp"),
    "tp_ep_pp": ("tp", "ep", "pp"),
    "tp": ("tp",),
    "expt_tp": ("tp",),
    "pp": ("pp",),
    "cp": ("cp",),
    "ep": ("ep",),
}
"""By role, the axes along which its ranks differ. In the order in which groups are created."""
REDUCED_AXES = frozenset({*DATA_AXES, "cp", "ep"})
"""Axes along which ranks process different tokens, so that dense gradients are averaged over them."""

# torch has no public API for the mesh that a mesh was sliced from; 2.9 renamed the private one.
root_of: Callable[[DeviceMesh], DeviceMesh] = (
    DeviceMesh._get_root_mesh if hasattr(DeviceMesh, "_get_root_mesh") else device_mesh._mesh_resources.get_root_mesh
)


def mesh_problem(mesh: DeviceMesh) -> ProcessGroupError | None:
    """Return the error unless the root mesh spans the world along axes with known names."""
    known = ", ".join(AXES)
    root = root_of(mesh)
    unknown = [axis for axis in names_of(root) if axis not in AXES]
    if not root.mesh_dim_names:
        return ProcessGroupError(f"the axes of {root} have no names; pass mesh_dim_names chosen from {known}")
    if unknown:
        return ProcessGroupError(
            f"mesh axis {unknown[0]!r} is unknown; allowed are {known}.{did_you_mean(unknown[0], AXES)} Rename the "
            "axis, or pass the groups by role as pg_collection=opt_stack.ProcessGroups(...)"
        )
    if root.size() != dist.get_world_size():
        return ProcessGroupError(
            f"the mesh {root} has {root.size()} of the world's {dist.get_world_size()} ranks; pass one that has all of "
            "them, or pass the groups by role as pg_collection=opt_stack.ProcessGroups(...)"
        )
    return None


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of the mesh's axes; empty if they have none."""
    return tuple(mesh.mesh_dim_names or ())


def is_outside(comm: Comm, mesh: DeviceMesh) -> bool:
    """Whether `comm` has several ranks, of which this one is the only one in the mesh."""
    ranks = members(comm)
    return comm.size > 1 and (not ranks or len(_ranks(mesh).intersection(ranks)) == 1)


def replicas_outside(param: Tensor, replicas: Sequence[Comm], *, name: str) -> tuple[Comm, ...]:
    """The groups of `replicas` over which the gradient of a DTensor parameter must still be averaged, in order.

    torch reduces gradients only along the axes of the parameter's own mesh. A mesh that was sliced from a larger one,
    such as the `"tp"` of `("dp", "tp")`, leaves replicas out.

    Raises:
        ProcessGroupError: the mesh contains a part of a data-parallel group, and its root does not explain which part.
    """
    mesh = mesh_of(param)
    if mesh.size() == dist.get_world_size():
        return ()
    outside: list[Comm] = []
    for comm in replicas:
        if is_outside(comm, mesh):
            outside.append(comm)
        elif not _ranks(mesh).issuperset(members(comm)):
            break
    else:
        return tuple(outside)
    # The groups along the data axes of the root over which the mesh does not extend.
    root = root_of(mesh)
    left_out = _axes_outside(root, mesh)
    names = names_of(root)
    unknown = [axis for axis in left_out if not names or names[axis] not in AXES]
    if unknown or root.size() != dist.get_world_size():
        raise ProcessGroupError(
            f"parameter {name!r} is a DTensor on {mesh.size()} of the world's {dist.get_world_size()} ranks ({mesh}), "
            "and it is unknown whether the others hold replicas of it; slice its mesh from one over the whole world, "
            f"with axes named from {', '.join(AXES)}, and pass that as mesh=..."
        )
    return tuple(TorchComm(root.get_group(axis)) for axis in left_out if names[axis] in REDUCED_AXES)


def tensor_peers_outside(param: Tensor, peers: Comm) -> tuple[Comm, ...]:
    """Groups of tensor-parallel ranks outside of a DTensor's mesh, which hold copies of this rank's part of it.

    `peers` is the group that the caller knows; the root of the mesh may have others.
    """
    mesh = mesh_of(param)
    if is_outside(peers, mesh):
        return (peers,)
    root = root_of(mesh)
    named = dict(enumerate(names_of(root)))
    axes = [axis for axis in _axes_outside(root, mesh) if named.get(axis) in TENSOR_PARALLEL_AXES]
    return tuple(TorchComm(root.get_group(axis)) for axis in axes)


def _axes_outside(root: DeviceMesh, mesh: DeviceMesh) -> list[int]:
    """The axes of several ranks of the root along which the mesh, which may be flattened, does not extend."""
    ranks = _ranks(mesh)
    places = [at for at in (root.mesh >= 0).nonzero().tolist() if int(root.mesh[tuple(at)]) in ranks]
    axes = [axis for axis in range(root.ndim) if root.size(axis) > 1]
    return [axis for axis in axes if len({at[axis] for at in places}) <= 1]


def _ranks(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def _along(root: DeviceMesh, *axes: str) -> dist.ProcessGroup | None:
    """The group of ranks that differ from this one along these axes only; None if it is one rank."""
    sizes = dict(zip(names_of(root), root.mesh.shape))
    chosen = tuple(axis for axis, size in sizes.items() if axis in axes and size > 1)
    if not chosen:
        return None
    if len(chosen) == 1:
        return root.get_group(chosen[0])
    if root[chosen].size() == dist.get_world_size():
        return dist.group.WORLD
    return root[chosen]._flatten().get_group()


def _ends_of(stages: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The first and the last pipeline stage, which share a tied embedding; None on the others."""
    if stages is None or stages.size() <= 2:
        return stages
    ranks = dist.get_process_group_ranks(stages)
    ends = [ranks[0], ranks[-1]]
    return dist.new_group(ends, use_local_synchronization=True) if dist.get_rank() in ends else None


def mesh_of(param: Tensor) -> DeviceMesh:
    """The mesh of a DTensor."""
    mesh: DeviceMesh = param.device_mesh  # type: ignore[attr-defined]
    return mesh


# Megatron-Core is never imported here: if its state is initialised, its module is loaded already.
PARALLEL_STATE = "megatron.core.parallel_state"
_GETTERS = MappingProxyType(
    {
        "dp": "data_parallel",
        "dp_cp": "data_parallel with_context_parallel",
        "intra_dp_cp": "data_parallel with_context_parallel partial_data_parallel",
        "expt_dp": "expert_data_parallel",
        "intra_expt_dp": "expert_data_parallel partial_expert_data_parallel",
        "mp": "model_parallel",
        "tp_ep_pp": "expert_tensor_model_pipeline_parallel",
        "tp": "tensor_model_parallel",
        "expt_tp": "expert_tensor_parallel",
        "pp": "pipeline_model_parallel",
        "cp": "context_parallel",
        "ep": "expert_model_parallel",
        "embd": "embedding",
        "pos_embd": "position_embedding",
        "inter_dist_opt": "inter_distributed_optimizer_instance",
        "intra_dist_opt": "intra_distributed_optimizer_instance",
    }
)
"""By role: NAME in `parallel_state.get_NAME_group`, and the arguments that are set to True."""


def megatron_is_initialized() -> bool:
    """Whether Megatron-Core is loaded and its model-parallel groups are initialised."""
    state: Any = sys.modules.get(PARALLEL_STATE)
    return state is not None and bool(state.model_parallel_is_initialized())


def groups_of_parallel_state() -> ProcessGroups:
    """The groups of Megatron-Core's `parallel_state`. Roles that its version or this run does not have stay unset."""
    state: Any = sys.modules[PARALLEL_STATE]
    groups = ProcessGroups()
    for role, described in _GETTERS.items():
        name, *flags = described.split()
        try:
            group = getattr(state, f"get_{name}_group")(**dict.fromkeys(flags, True))
        except (AssertionError, AttributeError, TypeError):  # it was not created, or this version does not know it
            continue
        if group is not None:
            setattr(groups, role, group)
    return groups


def groups_of_collection(collection: Any) -> ProcessGroups:
    """Convert any object with Megatron-Core's attributes to `ProcessGroups`; attributes may be missing.

    Its collections read as None where they were not set (since 0.19), which does not say that there is one rank.

    Raises:
        ProcessGroupError: the object has none of the attributes, or one is neither a process group nor None.
    """
    groups = ProcessGroups()
    for role in ROLES:
        group = getattr(collection, role, _MISSING)
        if group is None and getattr_static(collection, role, _MISSING) is _MISSING:
            continue
        if group is _MISSING or isinstance(group, list):  # hierarchical groups are not used here
            continue
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ProcessGroupError(
                f"pg_collection.{role} is a {type(group).__name__}; pass a torch.distributed.ProcessGroup or None"
            )
        setattr(groups, role, group)
    if not groups.roles:
        raise ProcessGroupError(
            f"pg_collection is a {type(collection).__name__} without any process group; pass "
            f"opt_stack.ProcessGroups(...) with the roles {', '.join(ROLES)}"
        )
    return groups


_MISSING = object()
