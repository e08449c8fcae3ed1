"""Find the process groups of a model: those that the caller passed, or those that its parameters imply. No guesses."""

import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from opt_config import ConfigError
from opt_distributed.comm.collectives import Alone, Comm, ProcessGroupError, agreed, comm_of
from opt_distributed.comm.groups import (
    Axes,
    ProcessGroups,
    Roles,
    groups_of_collection,
    groups_of_parallel_state,
    megatron_is_initialized,
    roles_of,
    world,
)
from opt_distributed.comm.mesh import check_mesh, is_known, meshes_of, names_of, root_of
from opt_paramgroups import ParamMeta, describe, describe_untrained, parameters_by_id

Given = ProcessGroups | Roles | Any | None
"""What a caller may pass as groups: `ProcessGroups`, `Roles`, or an object with Megatron-Core's attributes."""


def find_roles(chunks: Sequence[nn.Module], groups: Given, *, mesh: DeviceMesh | None = None, sharded: bool) -> Roles:
    """Find the groups of a step. Collective: every rank of the world calls it.

    The first of these that exists: `groups`; `mesh`; the groups of Megatron-Core's initialised `parallel_state`; the
    mesh that DTensor parameters were sliced from, if its axes have known names; all ranks that hold parameters, as
    data-parallel replicas. The last is refused if a parameter is marked as different on each rank.

    If a launcher announces several ranks and `torch.distributed` is not initialised, it is initialised first.

    Raises:
        ConfigError (a ValueError), on every rank: groups are missing, unknown or contradictory; both `groups` and
            `mesh` were given; or it is unknown which ranks hold replicas of a tensor-parallel parameter or an expert.
    """
    if isinstance(groups, Roles):
        if mesh is not None:
            raise ProcessGroupError("both pg_collection and mesh were given; pass one of them")
        return groups
    if groups is None:
        join_launched_world(dict.fromkeys(param.device.type for chunk in chunks for param in chunk.parameters()))
    everyone = world()
    if groups is None and mesh is None:
        return _roles_of_model(chunks, everyone, sharded=sharded)

    def check() -> None:
        if groups is not None and mesh is not None:
            raise ProcessGroupError("both pg_collection and mesh were given; pass one of them")
        if mesh is not None:
            check_mesh(mesh)

    agreed(everyone, check)
    given = ProcessGroups.from_mesh(mesh) if mesh is not None else groups
    return agreed(everyone, lambda: _roles_given(chunks, given, sharded=sharded))


class _Mark(NamedTuple):
    """Why a parameter may differ between ranks."""

    param: str
    reason: str
    axis: str  # the mesh axis along which it would differ


class _Facts(NamedTuple):
    """What one rank knows about its model."""

    has_params: bool
    has_megatron: bool
    marked: _Mark | None  # of the first parameter that may differ between ranks
    mesh: tuple[tuple[str, ...], tuple[int, ...]] | None  # names and sizes of the axes of a root mesh


def _roles_given(chunks: Sequence[nn.Module], given: Given, *, sharded: bool) -> Roles:
    groups = given if isinstance(given, ProcessGroups) else groups_of_collection(given)
    metas = describe(chunks).values()
    has_peers = groups.mp is not None and groups.mp.size() > 1
    for meta in metas if has_peers else ():
        marks = {
            "tensor parallel": meta.tensor_parallel,
            "marked sequence_parallel": meta.sequence_parallel,
            "marked average_gradients_across_tp_domain": meta.average_gradients_across_tp,
        }
        mark = next((mark for mark, is_set in marks.items() if is_set), "")
        if mark and not meta.is_dtensor:
            role = "expt_tp" if meta.is_expert else "tp"
            groups.require(role, because=f"because parameter {str(meta.id)!r} is {mark}")
    return roles_of(groups, sharded=sharded, has_experts=any(meta.is_expert for meta in metas))


def _roles_of_model(chunks: Sequence[nn.Module], everyone: Comm, *, sharded: bool) -> Roles:
    """The groups if the caller passed none."""
    if everyone.size == 1:
        return roles_of(None, sharded=sharded)
    params = list(parameters_by_id(chunks).values())
    root = next((root_of(mesh) for mesh in meshes_of(params) if is_known(mesh)), None)
    facts = agreed(everyone, lambda: _facts(chunks, root))
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
        return roles_of(None, sharded=False)
    group = dist.new_group(members)  # every rank calls it, whether it belongs or not
    axes = Axes(dp=comm_of(group) if everyone.rank in members else Alone(), tp=Alone())
    return Roles(dense=axes, expert=axes, everyone=everyone)


def _facts(chunks: Sequence[nn.Module], root: DeviceMesh | None) -> _Facts:
    untrained = [one.meta for one in describe_untrained(chunks).values()]
    marked = next(filter(None, map(_mark, [*describe(chunks).values(), *untrained])), None)
    mesh = None if root is None else (names_of(root), tuple(root.mesh.shape))
    return _Facts(bool(parameters_by_id(chunks)), megatron_is_initialized(), marked, mesh)


def _mark(meta: ParamMeta) -> _Mark | None:
    """None for a replicated parameter, and for a DTensor, whose mesh describes it."""
    if meta.is_dtensor:
        return None
    if meta.is_expert:
        return _Mark(str(meta.id), "an expert (allreduce=False)", "ep")
    if meta.tensor_parallel:
        return _Mark(str(meta.id), "tensor parallel (tensor_model_parallel=True)", "tp")
    return None


def _check_marks(per_rank: Sequence[_Facts], known_axes: set[str]) -> None:
    """Raise ProcessGroupError, the same on every rank, if it is unknown which ranks hold replicas of a parameter."""
    for rank, facts in enumerate(per_rank):
        if facts.marked is not None and facts.marked.axis not in known_axes:
            raise ProcessGroupError(
                f"parameter {facts.marked.param!r} is {facts.marked.reason} on rank {rank} of {len(per_rank)}, and "
                "neither process groups nor a mesh were given: "
                "which ranks hold its replicas is unknown; pass pg_collection=opt_stack.ProcessGroups(dp=..., tp=..., "
                "expt_dp=..., ...) or mesh=init_device_mesh(device, sizes, mesh_dim_names=('dp', 'tp')), or initialise "
                "Megatron-Core's parallel_state (DistributedDataParallel takes the groups as groups=...)"
            )


logger = logging.getLogger("opt_distributed")

WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets, and that torch's `env://` rendezvous reads."""


def join_launched_world(devices: Iterable[str]) -> None:
    """Initialise `torch.distributed` if a launcher started several processes and it is not initialised yet.

    `devices` are the device types of this rank's model; a backend is chosen for each of them and for the CPU.

    Raises:
        ConfigError: `WORLD_SIZE` is not a positive number, or is above 1 and other variables of the rendezvous are
            missing.
    """
    if not dist.is_available() or dist.is_initialized() or _world_size() == 1:
        return
    missing = [name for name in WORLD if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} in the environment, but torch.distributed is not initialised and "
            f"these variables are not set: {', '.join(missing)}; start the script with torchrun, call "
            "torch.distributed.init_process_group first, or unset WORLD_SIZE to train in one process"
        )
    backends = {kind: dist.get_default_backend_for_device(kind) for kind in dict.fromkeys(("cpu", *devices))}
    dist.init_process_group(",".join(f"{kind}:{backend}" for kind, backend in backends.items()))
    logger.info(
        "initialised torch.distributed as rank %d of %d (%s) from the launcher's environment",
        dist.get_rank(),
        dist.get_world_size(),
        ", ".join(backends.values()),
    )


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"WORLD_SIZE={text!r} in the environment; it must be a number of ranks, 1 or more: correct or unset it"
        )
    return int(text)
