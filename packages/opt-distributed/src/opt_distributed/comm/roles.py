"""`Roles`: the groups of a step, from those that the caller passed or that the model's parameters imply. No guesses."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from opt_distributed.comm.collectives import (
    ALONE,
    Alone,
    Comm,
    ProcessGroupError,
    TorchComm,
    agree,
    agreed,
    comm_of,
    telling,
)
from opt_distributed.comm.groups import (
    ProcessGroups,
    groups_of_collection,
    groups_of_parallel_state,
    megatron_is_initialized,
    mesh_problem,
    names_of,
    root_of,
)
from opt_distributed.comm.launcher import join_launched_world
from opt_distributed.comm.notices import Tells, advising
from opt_paramgroups import ParamMeta, describe, describe_untrained, parameters_by_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The groups over which one family of parameters, dense or experts, is distributed."""

    dp: Comm  # ranks among which state is sharded or replicated, and gradients are reduced
    tp: Comm  # ranks that hold other parts of the same matrices
    inter: Comm = ALONE  # the other instances, which hold the same shards

    @property
    def num_replicas(self) -> int:
        """Ranks over whose gradients the mean is taken."""
        return self.dp.size * self.inter.size

    @property
    def comms(self) -> tuple[Comm, ...]:
        """All of these groups."""
        return self.dp, self.inter, self.tp


def from_all_replicas(axes: Axes, value: Any) -> list[Any]:
    """Gather the values of all replicas, in the same order on every rank, instance by instance."""
    of_instance = axes.dp.gather_objects(value)
    return list(chain.from_iterable(axes.inter.gather_objects(of_instance)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """All groups, as the step uses them."""

    dense: Axes
    expert: Axes
    everyone: Comm  # all ranks of the model, which must agree on errors
    ep: Comm = ALONE  # ranks that hold other experts
    instance: Comm | None = None  # all ranks of one optimizer instance, over which a step's statistics are summed
    known_peers: Mapping[str, Comm] = field(default_factory=dict)  # those of `PEERS` that were given

    @property
    def peers(self) -> dict[str, Comm]:
        """The groups of `PEERS` that are known, by role."""
        return {"tp": self.dense.tp, "expt_tp": self.expert.tp, **self.known_peers}

    @property
    def comms(self) -> list[Comm]:
        """The groups over which parameters are distributed."""
        return [*self.dense.comms, *self.expert.comms]

    @property
    def totals(self) -> Comm:
        """The ranks over which statistics are summed: the instance, or all."""
        return self.everyone if self.instance is None else self.instance


PEERS = ("tp", "expt_tp", "embd", "pos_embd", "pp")
"""Roles of ranks that hold other parts of the same model, over which gradients may have to be summed."""


def peers_of(given: ProcessGroups | Roles) -> dict[str, Comm]:
    """The groups of `PEERS` that are known. A role that is missing was never set."""
    if isinstance(given, Roles):
        return given.peers
    return {role: comm_of(getattr(given, role)) for role in PEERS if role in given.roles}


def roles_of(groups: ProcessGroups, *, sharded: bool, has_experts: bool = True) -> Roles:
    """Derive the groups of a step.

    The ranks of the model are those of intra_dist_opt, or all. If dp has all of them, roles that follow from it need
    not be set: mp and intra_dist_opt, and those of experts if the model has none.

    Raises:
        ProcessGroupError: a required role was never set; group sizes contradict each other; or dp and mp do not make up
            the world, and intra_dist_opt was not set.
    """
    everyone = _ranks_of_model(groups, world())
    groups = _completed(groups, everyone, has_experts=has_experts)
    groups.require("dp", "expt_dp", "mp", "tp_ep_pp", because="always")
    if _size(groups.cp) > 1:
        groups.require("dp_cp", because="with context parallelism")
    if sharded:
        groups.require("intra_dist_opt", because="where optimizer state is sharded")
    if _size(groups.inter_dist_opt) > 1:
        groups.require("intra_dp_cp", "intra_expt_dp", because="with several optimizer instances")
    _check_sizes(groups)
    inter = comm_of(groups.inter_dist_opt)
    dense = Axes(dp=comm_of(groups.first_of("intra_dp_cp", "dp_cp", "dp")), tp=comm_of(groups.tp), inter=inter)
    instance: Comm | None = None
    if groups.intra_dist_opt is not None:
        instance = comm_of(groups.intra_dist_opt)
    else:  # statistics are summed over a group that has every rank of the model once
        ranks = dense.num_replicas * _size(groups.mp)
        if ranks not in (1, everyone.size):
            raise ProcessGroupError(
                f"dp and mp make up {ranks} of the world's {everyone.size} ranks; pass intra_dist_opt, the group of "
                "these ranks, over which norms are summed"
            )
        if ranks == 1:
            instance = ALONE
    replicas = comm_of(groups.first_of("intra_expt_dp", "expt_dp"))
    return Roles(
        dense=dense,
        expert=Axes(dp=replicas, tp=comm_of(groups.expt_tp), inter=inter),
        everyone=everyone,
        ep=comm_of(groups.ep),
        instance=instance,
        known_peers=peers_of(groups),
    )


def _ranks_of_model(groups: ProcessGroups, everyone: Comm) -> Comm:
    """All ranks that hold a part of the model, where they are fewer than the world; the world, `everyone`, if not."""
    replicas = groups.first_of("dp_cp", "dp")
    whole = groups.intra_dist_opt
    if everyone.size == 1 or _size(groups.inter_dist_opt) > 1:
        return everyone
    if whole is None:
        is_known = not {"mp", "intra_dist_opt"}.isdisjoint(groups.roles)
        return Alone() if is_known and _size(groups.mp) == _size(replicas) == 1 else everyone
    ranks = set(dist.get_process_group_ranks(whole))
    has_replicas = replicas is None or ranks.issuperset(dist.get_process_group_ranks(replicas))
    return comm_of(whole) if len(ranks) < everyone.size and has_replicas else everyone


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
    for whole, factors in (
        (("dp_cp", "dp"), ("dp", "cp")),
        (("dp_cp", "dp"), ("intra_dp_cp", "inter_dist_opt")),
        (("expt_dp",), ("intra_expt_dp", "inter_dist_opt")),
    ):
        size = _size(groups.first_of(*whole))
        sizes = {role: _size(getattr(groups, role)) for role in factors if role in groups.roles}
        if len(sizes) == len(factors) and math.prod(sizes.values()) != size:
            product = " and ".join(f"{role} of {ranks}" for role, ranks in sizes.items())
            raise ProcessGroupError(
                f"pg_collection has {' or '.join(whole)} of {size} ranks, but {product}; the first must be the product "
                "of the others (None stands for one rank)"
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


QK_NORMS = ("q_layernorm", "k_layernorm")
"""Parts of the names of norms that every tensor-parallel rank applies to its own heads."""


class Mark(NamedTuple):
    """Why a gradient is complete only after a sum or mean over peers."""

    attr: str  # of the parameter
    role: str  # of the process group
    comm: Comm | None  # None: the groups do not say which ranks are the peers


def uses_qk_layernorm(chunk: nn.Module) -> bool:
    """Whether a model says, by `config.qk_layernorm` as Megatron-Core's models, that it norms queries and keys."""
    modules = (module for module in chunk.modules() if hasattr(module, "config"))
    return any(getattr(module.config, "qk_layernorm", None) is True for module in modules)


def _tp_of(meta: ParamMeta) -> str:
    """The role of the ranks that hold other parts of the same matrix."""
    return "expt_tp" if meta.is_expert else "tp"


def marks_set(meta: ParamMeta, *, qk_layernorm: bool) -> list[tuple[str, str]]:
    """The marks for which a gradient may be incomplete on its replicas, each with the role of the peers."""
    tp = _tp_of(meta)
    found = (
        (meta.sequence_parallel, "sequence_parallel", tp),
        (meta.average_gradients_across_tp, "average_gradients_across_tp_domain", tp),
        (qk_layernorm and any(norm in meta.id.name for norm in QK_NORMS), "qk_layernorm", tp),
        (meta.shared_embedding, "shared_embedding", "embd"),
        (meta.shared_position_embedding, "shared_position_embedding", "pos_embd"),
        (meta.pipeline_parallel, "pipeline_parallel", "pp"),
    )
    return [(attr, role) for is_set, attr, role in found if is_set]


def marks_of(meta: ParamMeta, roles: Roles, *, qk_layernorm: bool, num_chunks: int = 1) -> list[Mark]:
    """Why the gradient of a parameter must be summed or averaged over other ranks; empty if it must not."""
    peers = roles.peers
    over_stages = roles.everyone.size > roles.dense.num_replicas * roles.dense.tp.size  # there are other stages
    found = [
        Mark(attr, role, peers.get(role))
        for attr, role in marks_set(meta, qk_layernorm=qk_layernorm)
        if (peers[role].size > 1 if role in peers else over_stages)
    ]
    if meta.pipeline_parallel and num_chunks > 1 and not found:
        found.append(Mark("pipeline_parallel", "pp", ALONE))  # the chunks of this rank hold copies
    return found


Given = ProcessGroups | Roles | Any | None
"""What a caller may pass as groups: `ProcessGroups`, `Roles`, or an object with Megatron-Core's attributes."""


def find_roles(chunks: Sequence[nn.Module], groups: Given, *, mesh: DeviceMesh | None, sharded: bool) -> Roles:
    """Find the groups of a step. Collective over the ranks of `groups`, or over the world without them.

    The first of these that exists: `groups`; `mesh`; the groups of Megatron-Core's initialised `parallel_state`; the
    mesh that DTensor parameters were sliced from, if its axes have known names; all ranks that hold parameters, as
    data-parallel replicas. The last is refused if a parameter is marked as different on each rank.

    If a launcher announces several ranks and `torch.distributed` is not initialised, it is initialised first.

    Raises:
        ConfigError (a ValueError), on every rank: groups are missing, unknown or contradictory; both `groups` and
            `mesh` were given; ranks were given different kinds of them; or it is unknown which ranks hold replicas of
            a tensor-parallel parameter or an expert.
    """
    if groups is None:
        join_launched_world(dict.fromkeys(param.device.type for chunk in chunks for param in chunk.parameters()))
    everyone = groups.everyone if isinstance(groups, Roles) else world()  # who must agree
    num_ranks = everyone.size  # of the groups: if they are fewer, the others may never come
    kind = "no groups"
    roles: Roles | None = None
    problem: Exception | None = None
    try:
        if mesh is not None:
            kind = "a mesh"
            if groups is not None:
                raise ProcessGroupError("both pg_collection and mesh were given; pass one of them")
            num_ranks = root_of(mesh).size()
            problem = mesh_problem(mesh)
        elif isinstance(groups, Roles):
            kind = "Roles"
            roles = groups
        elif groups is not None:
            kind = "process groups"
            by_role = groups if isinstance(groups, ProcessGroups) else groups_of_collection(groups)
            everyone = _ranks_of_model(by_role, everyone)
            if by_role.intra_dist_opt is None:
                num_ranks = _size(by_role.first_of("dp_cp", "dp")) * _size(by_role.mp)
            roles = _roles_given(chunks, by_role, sharded=sharded)
    except Exception as error:  # of any kind, as for what is not a mesh, because the other ranks wait
        problem = error
    advice = _ADVICE if kind == "no groups" else "all ranks of the groups must call it"
    with advising(advice, place=PLACE) if isinstance(everyone, Tells) else nullcontext():
        if problem is not None and num_ranks < everyone.size:
            with telling((everyone,), PLACE):
                raise problem
        kinds = agree(everyone, problem, kind)
    if len(set(kinds)) > 1:
        raise ProcessGroupError(f"ranks were given different kinds of groups: {kinds}, by rank; pass the same on all")
    if roles is not None:
        return roles
    if mesh is None:
        return _roles_of_model(chunks, everyone, sharded=sharded)
    of_mesh = ProcessGroups.from_mesh(mesh)
    return agreed(everyone, lambda: _roles_given(chunks, of_mesh, sharded=sharded))


PLACE = "get_optimizer or DistributedDataParallel"
_ADVICE = (
    "all ranks of torch.distributed must call it if no groups are given; if only some ranks train, pass their process "
    "group on these, as pg_collection=opt_stack.ProcessGroups(dp=GROUP, intra_dist_opt=GROUP) (groups=... of "
    "DistributedDataParallel)"
)


class _Facts(NamedTuple):
    """What one rank knows about its model."""

    has_params: bool
    has_megatron: bool
    marked: tuple[str, str, str] | None  # the first parameter that may differ between ranks, why, along which mesh axis
    mesh: tuple[tuple[str, ...], tuple[int, ...]] | None  # names and sizes of the axes of a root mesh


def _roles_given(chunks: Sequence[nn.Module], groups: ProcessGroups, *, sharded: bool) -> Roles:
    metas = describe(chunks).values()
    for meta in metas if _size(groups.mp) > 1 else ():
        if meta.is_dtensor:
            continue
        marks = [f"marked {attr}" for attr, role in marks_set(meta, qk_layernorm=False) if role == _tp_of(meta)]
        if meta.tensor_parallel:
            marks.insert(0, "tensor parallel")
        if marks:
            groups.require(_tp_of(meta), because=f"because parameter {str(meta.id)!r} is {marks[0]}")
    return roles_of(groups, sharded=sharded, has_experts=any(meta.is_expert for meta in metas))


def _roles_of_model(chunks: Sequence[nn.Module], everyone: Comm, *, sharded: bool) -> Roles:
    """The groups if the caller passed none."""
    if everyone.size == 1:
        return _replicas(everyone, everyone)
    facts, root = agreed(everyone, lambda: _facts(chunks))
    per_rank: list[_Facts] = everyone.gather_objects(facts)
    if all(rank.has_megatron for rank in per_rank):
        return agreed(everyone, lambda: roles_of(groups_of_parallel_state(), sharded=sharded))
    if root is not None and all(rank.mesh == facts.mesh for rank in per_rank):
        _check_marks(per_rank, {"tp", "ep"}.intersection(names_of(root)))
        return roles_of(ProcessGroups.from_mesh(root), sharded=sharded)
    _check_marks(per_rank, set())
    # A rank without parameters gets a world of one: it reduces and updates nothing, and contributes zeros to the
    # statistics of all ranks, so that its step has the same result. If no rank holds parameters, all are replicas.
    members = [number for number, rank in enumerate(per_rank) if rank.has_params]
    if len(members) in (0, everyone.size):
        return _replicas(everyone, everyone)
    group = dist.new_group(members)  # every rank calls it, whether it belongs or not
    return _replicas(comm_of(group if everyone.rank in members else None), everyone)


def _replicas(dp: Comm, everyone: Comm) -> Roles:
    """The groups of a model that no rank holds a part of: `dp` are its replicas."""
    axes = Axes(dp=dp, tp=ALONE)
    return Roles(dense=axes, expert=axes, everyone=everyone)


def _facts(chunks: Sequence[nn.Module]) -> tuple[_Facts, DeviceMesh | None]:
    """The facts of this rank, and the root of the first mesh of a parameter whose axes have known names."""
    params = parameters_by_id(chunks)
    root = None
    for param in params.values():
        mesh = getattr(param, "device_mesh", None)
        if root is None and isinstance(mesh, DeviceMesh) and mesh_problem(mesh) is None:
            root = root_of(mesh)
    metas = [*describe(chunks).values()]
    metas += [untrained.meta for untrained in describe_untrained(chunks).values()]
    marked = None
    for meta in metas:
        if meta.is_dtensor or marked is not None:  # the mesh of a DTensor describes it
            continue
        if meta.is_expert:
            marked = (str(meta.id), "an expert (allreduce=False)", "ep")
        elif meta.tensor_parallel:
            marked = (str(meta.id), "tensor parallel (tensor_model_parallel=True)", "tp")
    known_mesh = None if root is None else (names_of(root), tuple(root.mesh.shape))
    return _Facts(bool(params), megatron_is_initialized(), marked, known_mesh), root


def _check_marks(per_rank: Sequence[_Facts], known_axes: set[str]) -> None:
    """Raise ProcessGroupError, the same on every rank, if it is unknown which ranks hold replicas of a parameter."""
    for rank, facts in enumerate(per_rank):
        if facts.marked is not None and facts.marked[2] not in known_axes:
            raise ProcessGroupError(
                f"parameter {facts.marked[0]!r} is {facts.marked[1]} on rank {rank} of {len(per_rank)}, and "
                "neither process groups nor a mesh were given: "
                "which ranks hold its replicas is unknown; pass pg_collection=opt_stack.ProcessGroups(dp=..., tp=..., "
                "expt_dp=..., ...) or mesh=init_device_mesh(device, sizes, mesh_dim_names=('dp', 'tp')), or initialise "
                "Megatron-Core's parallel_state (DistributedDataParallel takes the groups as groups=...)"
            )
