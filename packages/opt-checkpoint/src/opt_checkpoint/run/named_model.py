"""`sharded_model`: the tensors of a model as a sharded state, by name."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from opt_checkpoint.errors import CheckpointMismatchError
from opt_checkpoint.run.ranks import Ranks, on_all, ranks_of
from opt_checkpoint.state.megatron_types import from_megatron
from opt_checkpoint.state.model_parallel import ModelAxes, marks_of, place_
from opt_checkpoint.state.sharded import ShardedStateDict, Source
from opt_checkpoint.state.tensors import is_dtensor, local_tensor, sharded_like
from opt_checkpoint.state.tree import ScopedState
from opt_checkpoint.state.wrappers import named_modules, plain_names


def sharded_model(
    model: nn.Module, *, process_group: dist.ProcessGroup | None = None, groups: Any = None
) -> ShardedStateDict:
    """Return a model's parameters and persistent buffers as a sharded state, by name.

    Parameters that are divided over tensor-parallel ranks, experts and pipeline stages are recognised by
    Megatron-Core's attributes. They are placed by `groups`, or later by `optimizer.sharded_state_dict` of opt-stack,
    which knows its groups. A module with a method `sharded_state_dict(prefix)` describes its own tensors.

    Args:
        model: plain, under DDP, or with DTensor parameters (FSDP2, tensor parallelism).
        process_group: the ranks that hold the same plain tensors; None for all.
        groups: process groups by role, as `opt_stack.ProcessGroups` or Megatron-Core's collection. Then this is
            collective: all ranks call it.

    Raises:
        CheckpointingException: a DTensor is not a single block of its tensor, or `groups` do not tell which part of the
            model each rank has; with `groups`, on every rank.
    """
    if groups is None:
        return _described(model, process_group)
    of_groups = lambda: (_described(model, process_group), _axes_of(groups))
    described, axes = on_all(ranks_of(None), of_groups, "describing a model")
    place_(described, axes)
    return described


def _described(model: nn.Module, process_group: dist.ProcessGroup | None) -> ScopedState:
    """`sharded_model` without groups."""
    ranks = ranks_of(process_group)
    modules = list(named_modules(model))
    described: dict[str, Any] = {}
    describing: tuple[str, ...] = ()  # prefixes of modules that describe themselves, as Megatron-Core's do
    for module, _, _, name in modules:
        describe = getattr(module, "sharded_state_dict", None)
        if describe is None or name.startswith(describing):
            continue
        if "prefix" in inspect.signature(describe).parameters:
            describing += (name,)
            described |= from_megatron(describe(prefix=name))
    entries = model.state_dict(keep_vars=True)
    values = {name: entries[key] for key, name in plain_names(modules, entries).items() if name not in described}
    marks = marks_of(modules, values)
    places = {}  # the path of each parameter and buffer, by the `id` of the tensor
    for module, path, _, _ in modules:
        for last, tensor in (*module._parameters.items(), *module._buffers.items()):
            places[id(tensor)] = f"{path}{last}"
    compared = ranks.size > 1 and process_group is None
    state: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            is_compared = compared and isinstance(value, nn.Parameter) and not is_dtensor(value)
            entry = sharded_like(name, value, replica_id=0 if is_compared else ranks.rank)
            entry.may_repeat = entry.may_repeat or is_compared
            entry.marks = marks[name]
            if id(value) in places:
                entry.source = Source(partial(_tensor_now, model, places[id(value)], value), local_tensor(value))
            value = entry
        state[name] = value
    return ScopedState(state | described)


def _tensor_now(model: nn.Module, path: str, described: Tensor) -> Tensor:
    """The tensor that is at this path in the model now.

    Raises:
        CheckpointMismatchError: there is none.
    """
    *parts, last = path.split(".")
    module: nn.Module | None = model
    for part in parts:
        module = None if module is None else module._modules.get(part)
    tensor = None if module is None else module._parameters.get(last, module._buffers.get(last))
    if tensor is None:
        raise CheckpointMismatchError(
            f"the model has no tensor {path} any more; call sharded_model(model) again before the save or load"
        )
    # Between a forward and the next backward pass, FSDP2 has whole parameters in the place of the DTensors.
    return described if is_dtensor(described) and not is_dtensor(tensor) else tensor


def _axes_of(groups: Any) -> ModelAxes:
    """The axes of an object with process groups by role. A role that is absent or None has one rank."""

    def axis(*roles: str) -> Ranks:
        found = (getattr(groups, role, None) for role in roles)
        group = next((group for group in found if group is not None), None)
        return Ranks() if group is None else ranks_of(group)

    return ModelAxes(
        all_ranks=ranks_of(None),
        tp=axis("tp"),
        expert_tp=axis("expt_tp"),
        ep=axis("ep"),
        pp=axis("pp"),
        dense=axis("dp_cp", "dp"),
        expert=axis("expt_dp"),
    )
