"""`sharded_model`: the tensors of a model as a sharded state, by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from opt_checkpoint.errors import CheckpointMismatchError, CheckpointValueError
from opt_checkpoint.run.ranks import Ranks, ranks_of
from opt_checkpoint.state.model_parallel import ModelAxes, marks_of, place_
from opt_checkpoint.state.sharded import ShardedStateDict, Source
from opt_checkpoint.state.tensors import is_dtensor, local_tensor, sharded_like
from opt_checkpoint.state.tree import ScopedState

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def plain_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map names of parameters in a model to names without the parts that wrappers (DDP, compile, checkpointing) add.

    Args:
        model: the model that the names refer to. A leading `module.` is removed only if all names have it (DDP).
        names: some or all of the names in its state dict.

    Raises:
        CheckpointingException: two names would become one.
    """
    every = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    wrapped = bool(every) and all(name.startswith("module.") for name in every)
    found: dict[str, str] = {}
    for name in names:
        plain = name.removeprefix("module.") if wrapped else name
        for part in _WRAPPERS:
            plain = plain.replace(part, "")
        if plain in found:
            raise CheckpointValueError(f"{found[plain]} and {name} would both be stored as {plain}; rename one module")
        found[plain] = name
    return {name: plain for plain, name in found.items()}


def sharded_model(
    model: nn.Module, *, process_group: dist.ProcessGroup | None = None, groups: Any = None
) -> ShardedStateDict:
    """A model's parameters and persistent buffers as a sharded state, by name.

    Parameters that are divided over tensor-parallel ranks, experts and pipeline stages are recognised by
    Megatron-Core's attributes. They are placed by `groups`, or later by `optimizer.sharded_state_dict` of opt-stack,
    which knows its groups. A module with a method `sharded_state_dict(prefix)` describes its own tensors.

    Args:
        model: plain, under DDP, or with DTensor parameters (FSDP2, tensor parallelism).
        process_group: the ranks that hold the same plain tensors; None for all.
        groups: process groups by role, as `opt_stack.ProcessGroups` or Megatron-Core's collection. Then this is
            collective: all ranks call it.

    Raises:
        CheckpointingException: a DTensor is not a single block of its tensor; or, on every rank, `groups` do not tell
            which part of the model each rank has.
    """
    ranks = ranks_of(process_group)
    described: dict[str, Any] = {}
    describing: list[str] = []  # prefixes of modules that describe themselves, as Megatron-Core's do
    for name, module in model.named_modules():
        describe = getattr(module, "sharded_state_dict", None)
        if describe is None or any(name.startswith(outer) for outer in describing):
            continue
        if "prefix" in inspect.signature(describe).parameters:
            describing.append(f"{name}." if name else "")
            described |= describe(prefix=describing[-1])
    values = {n: v for n, v in model.state_dict(keep_vars=True).items() if n not in described}
    names = plain_names(model, values)
    marks = marks_of(model, names, values)
    places = _places(model)
    compared = ranks.size > 1 and process_group is None
    state: dict[str, Any] = {}
    for name, plain in names.items():
        value = values[name]
        if isinstance(value, Tensor):
            is_compared = compared and isinstance(value, nn.Parameter) and not is_dtensor(value)
            entry = sharded_like(plain, value, replica_id=0 if is_compared else ranks.rank)
            entry.may_repeat, entry.marks = entry.may_repeat or is_compared, marks[plain]
            if id(value) in places:
                entry.source = Source(partial(_tensor_now, model, places[id(value)], value), local_tensor(value))
            value = entry
        state[plain] = value
    sharded = ScopedState(state | described)
    if groups is not None:
        place_(sharded, _axes_of(groups))
    return sharded


def _places(model: nn.Module) -> dict[int, str]:
    """The name of each parameter and buffer among the modules, by the `id` of the tensor."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {id(tensor): name for name, tensor in tensors}


def _tensor_now(model: nn.Module, name: str, described: Tensor) -> Tensor:
    """The tensor that has this name in the model now.

    Raises:
        CheckpointMismatchError: there is none.
    """
    *path, last = name.split(".")
    module: nn.Module | None = model
    for part in path:
        module = None if module is None else module._modules.get(part)
    tensor = None if module is None else module._parameters.get(last, module._buffers.get(last))
    if tensor is None:
        raise CheckpointMismatchError(
            f"the model has no tensor {name} any more; call sharded_model(model) again before the save or load"
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
