"""`ProcessGroups`: process groups by role, as the caller gives them; `Roles`: the same as the step uses them."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from opt_distributed.comm.collectives import Alone, Comm, ProcessGroupError, TorchComm, comm_of
from opt_distributed.comm.mesh import groups_of_mesh

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
        """The groups of a mesh with named axes that spans the world; see `comm.mesh.AXES`. Collective.

        Raises:
            ProcessGroupError: an axis has no name or an unknown one, or the mesh does not span the world.
        """
        return cls(**groups_of_mesh(mesh))

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that were set, including those set to None."""
        return tuple(vars(self))

    def first_of(self, *roles: str) -> dist.ProcessGroup | None:
        """The group of the first of `roles` that was set, even to None; None if none of them was set."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The groups over which one family of parameters, dense or experts, is distributed."""

    dp: Comm  # ranks among which state is sharded or replicated, and gradients are reduced
    tp: Comm  # ranks that hold other parts of the same matrices
    inter: Comm = field(default_factory=Alone)  # the other instances, which hold the same shards

    @property
    def num_replicas(self) -> int:
        """Ranks over whose gradients the mean is taken."""
        return self.dp.size * self.inter.size


def from_all_replicas(axes: Axes, value: Any) -> list[Any]:
    """Gather the values of all replicas, in the same order on every rank, instance by instance."""
    return [one for instance in axes.inter.gather_objects(axes.dp.gather_objects(value)) for one in instance]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """All groups, as the step uses them."""

    dense: Axes
    expert: Axes
    everyone: Comm  # all ranks of the model, which must agree on errors
    ep: Comm = field(default_factory=Alone)  # ranks that hold other experts
    instance: Comm | None = None  # all ranks of one optimizer instance, over which a step's statistics are summed
    embedding: Comm | None = None  # stages that hold the tied embedding; None: unknown
    positions: Comm | None = None  # stages that hold the position embedding; None: unknown
    pp: Comm | None = None  # pipeline stages; None: unknown

    @property
    def totals(self) -> Comm:
        """The ranks over which statistics are summed: the instance, or all."""
        return self.everyone if self.instance is None else self.instance


PEERS = ("tp", "expt_tp", "embd", "pos_embd", "pp")
"""Roles of ranks that hold other parts of the same model, over which gradients may have to be summed."""


def peers_of(given: "ProcessGroups | Roles | None") -> dict[str, Comm]:
    """The groups of `PEERS` that are known. A role that is missing was never set."""
    if given is None:
        return {}
    if isinstance(given, ProcessGroups):
        return {role: comm_of(getattr(given, role)) for role in PEERS if role in given.roles}
    found = zip(PEERS, (given.dense.tp, given.expert.tp, given.embedding, given.positions, given.pp), strict=True)
    return {role: comm for role, comm in found if comm is not None}


def roles_of(groups: ProcessGroups | None, *, sharded: bool, has_experts: bool = True) -> Roles:
    """Derive the groups of a step. None: all ranks of `torch.distributed` are data parallel.

    If dp has all ranks, roles that follow from it need not be set: mp and intra_dist_opt, and those of experts if the
    model has none.

    Raises:
        ProcessGroupError: a required role was never set; group sizes contradict each other; or dp and mp do not make up
            the world, and intra_dist_opt was not set.
    """
    everyone = world()
    if groups is None:
        axes = Axes(dp=everyone, tp=Alone())
        return Roles(dense=axes, expert=axes, everyone=everyone)
    groups = _completed(groups, everyone, has_experts=has_experts)
    groups.require("dp", "expt_dp", "mp", "tp_ep_pp", because="always")
    if groups.cp is not None and groups.cp.size() > 1:
        groups.require("dp_cp", because="with context parallelism")
    if sharded:
        groups.require("intra_dist_opt", because="where optimizer state is sharded")
    if _size(groups.inter_dist_opt) > 1:
        groups.require("intra_dp_cp", "intra_expt_dp", because="with several optimizer instances")
    _check_sizes(groups)
    inter = comm_of(groups.inter_dist_opt)
    known = peers_of(groups)
    dense = Axes(dp=comm_of(groups.first_of("intra_dp_cp", "dp_cp", "dp")), tp=comm_of(groups.tp), inter=inter)
    return Roles(
        dense=dense,
        expert=Axes(dp=comm_of(groups.first_of("intra_expt_dp", "expt_dp")), tp=comm_of(groups.expt_tp), inter=inter),
        everyone=everyone,
        ep=comm_of(groups.ep),
        instance=_instance(groups, dense, everyone),
        embedding=known.get("embd"),
        positions=known.get("pos_embd"),
        pp=known.get("pp"),
    )


def _completed(groups: ProcessGroups, everyone: Comm, *, has_experts: bool) -> ProcessGroups:
    """Add the roles that follow from a data-parallel group of all ranks.

    Raises ProcessGroupError if a group that holds other parts of the model has several ranks, too.
    """
    replicas = groups.first_of("dp_cp", "dp")
    if replicas is None or replicas.size() != everyone.size:
        return groups
    larger = next((role for role in ("mp", "tp", "pp") if _size(getattr(groups, role)) > 1), None)
    if larger is not None and everyone.size > 1:
        raise ProcessGroupError(
            f"pg_collection has all {everyone.size} ranks in dp (or dp_cp), and {larger} of "
            f"{_size(getattr(groups, larger))} ranks; the ranks of {larger} hold other parts of the model, so they "
            "are not replicas; leave them out of dp"
        )
    certain: dict[str, dist.ProcessGroup | None] = {"mp": None}
    if not has_experts:
        certain |= {"expt_dp": replicas, "tp_ep_pp": None}
    if _size(groups.inter_dist_opt) == 1:
        certain["intra_dist_opt"] = replicas
    given = {role: getattr(groups, role) for role in groups.roles}
    return ProcessGroups(**{**certain, **given})


def _check_sizes(groups: ProcessGroups) -> None:
    """Raise ProcessGroupError if sizes contradict each other: no reduction would reach some of the replicas."""
    instances = _size(groups.inter_dist_opt)
    replicas = _size(groups.first_of("dp_cp", "dp"))
    products = {
        "dp_cp": ({"dp": _size(groups.dp), "cp": _size(groups.cp)}, replicas),
        "dp_cp or dp": ({"intra_dp_cp": _size(groups.intra_dp_cp), "inter_dist_opt": instances}, replicas),
        "expt_dp": (
            {"intra_expt_dp": _size(groups.intra_expt_dp), "inter_dist_opt": instances},
            _size(groups.expt_dp),
        ),
    }
    for whole, (factors, size) in products.items():
        if all(factor in groups.roles for factor in factors) and math.prod(factors.values()) != size:
            sizes = " and ".join(f"{role} of {ranks}" for role, ranks in factors.items())
            raise ProcessGroupError(
                f"pg_collection has {whole} of {size} ranks, but {sizes}; the first must be the product of the others "
                "(None stands for one rank)"
            )


def _instance(groups: ProcessGroups, dense: Axes, everyone: Comm) -> Comm | None:
    """The group over which statistics are summed: it must contain every rank of the model once."""
    if groups.intra_dist_opt is not None:
        return comm_of(groups.intra_dist_opt)
    ranks = dense.num_replicas * _size(groups.mp)
    if ranks in (1, everyone.size):
        return Alone() if ranks == 1 else None
    raise ProcessGroupError(
        f"dp and mp make up {ranks} of the world's {everyone.size} ranks; pass intra_dist_opt, the group of these "
        "ranks, over which norms are summed"
    )


def world() -> Comm:
    """All ranks of `torch.distributed`; a world of one if it is not initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    group = dist.group.WORLD
    assert group is not None
    return TorchComm(group)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


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
    for role, (name, *flags) in ((role, getter.split()) for role, getter in _GETTERS.items()):
        getter = getattr(state, f"get_{name}_group", None)
        try:
            group = None if getter is None else getter(**dict.fromkeys(flags, True))
        except (AssertionError, TypeError):  # the group was not created, or this version lacks the argument
            continue
        if group is not None:
            setattr(groups, role, group)
    return groups


def groups_of_collection(collection: Any) -> ProcessGroups:
    """Convert any object with Megatron-Core's attributes to `ProcessGroups`; attributes may be missing.

    Raises:
        ProcessGroupError: the object has none of the attributes, or one is neither a process group nor None.
    """
    groups = ProcessGroups()
    for role in ROLES:
        group = getattr(collection, role, _MISSING)
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
