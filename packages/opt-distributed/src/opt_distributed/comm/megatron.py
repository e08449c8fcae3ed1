"""Megatron-Core's process groups: its initialised `parallel_state`, or its `ProcessGroupCollection`.

Megatron-Core is never imported here: if its state is initialised, its module is loaded already. No other file reads it.
"""

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from opt_distributed.comm.groups import ROLES, ProcessGroupError, ProcessGroups

MODULE = "megatron.core.parallel_state"
_GETTERS: Mapping[str, tuple[str, dict[str, bool]]] = MappingProxyType(
    {
        "dp": ("get_data_parallel_group", {}),
        "dp_cp": ("get_data_parallel_group", {"with_context_parallel": True}),
        "intra_dp_cp": (
            "get_data_parallel_group",
            {"with_context_parallel": True, "partial_data_parallel": True},
        ),
        "expt_dp": ("get_expert_data_parallel_group", {}),
        "intra_expt_dp": ("get_expert_data_parallel_group", {"partial_expert_data_parallel": True}),
        "mp": ("get_model_parallel_group", {}),
        "tp_ep_pp": ("get_expert_tensor_model_pipeline_parallel_group", {}),
        "tp": ("get_tensor_model_parallel_group", {}),
        "expt_tp": ("get_expert_tensor_parallel_group", {}),
        "pp": ("get_pipeline_model_parallel_group", {}),
        "cp": ("get_context_parallel_group", {}),
        "ep": ("get_expert_model_parallel_group", {}),
        "embd": ("get_embedding_group", {}),
        "pos_embd": ("get_position_embedding_group", {}),
        "inter_dist_opt": ("get_inter_distributed_optimizer_instance_group", {}),
        "intra_dist_opt": ("get_intra_distributed_optimizer_instance_group", {}),
    }
)
"""By role: the function of `parallel_state` that returns the group, and its arguments."""


def is_initialized() -> bool:
    """Whether Megatron-Core is loaded and its model-parallel groups are initialised."""
    state: Any = sys.modules.get(MODULE)
    return state is not None and bool(state.model_parallel_is_initialized())


def groups_of_parallel_state() -> ProcessGroups:
    """The groups of Megatron-Core's `parallel_state`. Roles that its version or this run does not have stay unset."""
    state: Any = sys.modules[MODULE]
    groups = ProcessGroups()
    for role, (name, arguments) in _GETTERS.items():
        getter = getattr(state, name, None)
        try:
            group = None if getter is None else getter(**arguments)
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
