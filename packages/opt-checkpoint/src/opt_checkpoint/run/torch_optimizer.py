"""Saves and loads the state of any `torch.optim` optimizer under FSDP2, tensor parallelism or plain DDP.

Keys are `optimizer.state.<state name>.<parameter name>`, as if the optimizer were not sharded. State that does not
exist yet is created in its stored dtype, never by a step with artificial gradients. An optimizer that overrides
`state_dict` and `load_state_dict` is saved and loaded in the form of its state_dict (as codes, as local shards).
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from opt_checkpoint.dcp.layout import fingerprint
from opt_checkpoint.dcp.load_planner import ShardedLoadPlanner
from opt_checkpoint.dcp.reader import Verify
from opt_checkpoint.disk.checkpoint import Opened
from opt_checkpoint.disk.index import CheckpointIndex
from opt_checkpoint.errors import CheckpointMismatchError, CheckpointValueError
from opt_checkpoint.run.ranks import Ranks, from_all, ranks_of, same_location
from opt_checkpoint.run.save_load import carry_out_load, open_everywhere
from opt_checkpoint.run.saved_optimizer import PREFIX, SavedOptimizer, find_optimizer, with_current_names
from opt_checkpoint.state.groups import NO_OVERRIDE, Conflict, GroupReport, apply_saved_groups, groups_to_saved
from opt_checkpoint.state.model_parallel import Marks, marks_of
from opt_checkpoint.state.sharded import ShardedStateDict, ShardedTensor
from opt_checkpoint.state.tensors import empty_like_sharded, is_dtensor, like_sharded, local_tensor, sharded_like
from opt_checkpoint.state.tree import ScopedState
from opt_checkpoint.state.wrappers import named_modules, named_parameters
from opt_checkpoint.store import AnyPath, Location

logger = logging.getLogger(__name__)
OPTIMIZER = "optimizer."


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerLoadReport:
    """The result of loading an optimizer.

    Args:
        groups: the result for the parameter groups.
        uninitialised: parameters that have no state now, because none was saved for them.
        gone: parameters with saved state that this optimizer does not have.
    """

    groups: GroupReport
    uninitialised: tuple[str, ...]
    gone: tuple[str, ...]


class _Named(NamedTuple):
    """A parameter of an optimizer."""

    name: str
    param: nn.Parameter
    group: dict[str, Any]
    marks: Marks


def sharded_optimizer(
    model: nn.Module, optimizer: Optimizer, *, process_group: dist.ProcessGroup | None = None
) -> ShardedStateDict:
    """An optimizer's state and groups as a sharded state: `save({"optimizer": sharded_optimizer(model, opt)}, path)`.

    A parameter without a state, which never had a gradient, is recorded as such.

    Args:
        model: contains every parameter of the optimizer.
        optimizer: any torch optimizer whose states have the layout of their parameter, or are equal on all ranks. It
            must not have changed at the save, so describe it before each.
        process_group: the ranks that hold the same plain tensors; None for all.

    Raises:
        CheckpointingException: a parameter has no name in the model, or a state is neither.
    """
    rank = ranks_of(process_group).rank
    tensors: dict[str, dict[str, ShardedTensor]] = defaultdict(dict)
    plain: dict[str, dict[str, Any]] = defaultdict(dict)
    named = list(_named(model, optimizer))
    states: Mapping[Tensor, Mapping[str, Any]] = optimizer.state
    if type(optimizer).state_dict is not Optimizer.state_dict:  # in another form, such as codes
        params = [member.param for member in named]
        states = {params[index]: values for index, values in optimizer.state_dict()["state"].items()}
    for member in named:
        for state_name, value in states.get(member.param, {}).items():
            if not isinstance(value, Tensor):
                plain[member.name][state_name] = value
                continue
            key = f"{PREFIX}{state_name}.{member.name}"
            if is_dtensor(member.param) and not is_dtensor(value) and value.dim():
                raise CheckpointValueError(
                    f"{key} is a plain tensor of shape {tuple(value.shape)} for a DTensor parameter: it may be a "
                    f"shard, or the same on all ranks; describe it with make_sharded_state"
                )
            tensors[member.name][state_name] = _described(member, key, value, rank)
    parts = {
        "state": dict(tensors),
        "plain_state": dict(plain),
        "state_names": {member.name: sorted(states.get(member.param, {})) for member in named},
        "param_shapes": {member.name: list(member.param.shape) for member in named},
        **groups_to_saved(optimizer.param_groups, _names_by_group(optimizer, named)),
    }
    check = partial(_check_current, optimizer, _copied_values(optimizer))
    return ScopedState(parts, replaces=OPTIMIZER, check=check)


def _copied_values(optimizer: Optimizer) -> int:
    """A number for everything that a description copies, to find out later whether it has changed.

    Tensors of state are shared, so it is the tensors that count; of an optimizer with a `state_dict` of another form,
    which are copied, the step counts.
    """
    is_shared = type(optimizer).state_dict is Optimizer.state_dict
    copied: list[Any] = []
    for group in optimizer.param_groups:
        copied.append({field: value for field, value in group.items() if field != "params"})
        for param in group["params"]:
            for name, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor) and is_shared:
                    copied.append((name, id(value)))
                elif not isinstance(value, Tensor) or not value.dim():
                    copied.append((name, value))
    return fingerprint(copied)


def _check_current(optimizer: Optimizer, described: int) -> None:
    if _copied_values(optimizer) != described:
        raise CheckpointValueError(
            f"the groups or states of {type(optimizer).__name__} have changed since sharded_optimizer described them; "
            f"call sharded_optimizer(model, optimizer) before each save"
        )


def _described(member: _Named, key: str, value: Tensor, rank: int) -> ShardedTensor:
    """Describe a state. That of a tensor-parallel parameter or an expert is refused on several ranks."""
    described = sharded_like(key, value, replica_id=rank)
    described.marks = member.marks if member.marks.problem() else None
    return described


def _named(model: nn.Module, optimizer: Optimizer) -> Iterator[_Named]:
    """The optimizer's parameters in its order. A tied parameter has the name that sorts first."""
    modules = list(named_modules(model))
    params = named_parameters(modules)
    marks = marks_of(modules, params)
    names: dict[int, str] = {}
    for name in sorted(params):
        names.setdefault(id(params[name]), name)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in names:
                raise CheckpointValueError(
                    f"a parameter of shape {tuple(param.shape)} of the optimizer is not in the model; pass the model "
                    f"whose parameters the optimizer was built from"
                )
            yield _Named(names[id(param)], param, group, marks[names[id(param)]])


def _names_by_group(optimizer: Optimizer, named: Sequence[_Named]) -> list[list[str]]:
    names = {id(member.param): member.name for member in named}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def load_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    path: AnyPath,
    *,
    at: tuple[str, ...] = ("optimizer",),
    process_group: dist.ProcessGroup | None = None,
    on_conflict: Conflict = "error",
    override: Mapping[str, Any] = NO_OVERRIDE,
    verify: Verify = "sizes",
) -> OptimizerLoadReport:
    """Load an optimizer's state and groups, however it was sharded when saved; all ranks call this together.

    Everything is read into new memory first: if this raises, the optimizer is unchanged. State that was saved by
    another class of optimizer is loaded with a warning, because this one may not use it.

    Args:
        model: contains the parameters, under the names that were saved.
        optimizer: its `state` and the fields of its `param_groups` are replaced.
        path: a checkpoint with `sharded_optimizer(...)` in its state; or with an optimizer's state dict of
            `torch.distributed.checkpoint.state_dict`, as torchtitan saves it, flattened or not.
        at: the keys under which the optimizer is stored, such as `("optim",)`.
        process_group: the ranks that load.
        on_conflict: as for `apply_saved_groups`.
        override: as for `apply_saved_groups`, for example `{"lr": 1e-4}`.
        verify: as for `load`.

    Raises:
        CheckpointKeyError: no optimizer is there, or one of its states is incomplete.
        CheckpointMismatchError: a parameter had another shape when its state was saved.
        CheckpointingException: as `load`, and as `apply_saved_groups`.
    """
    ranks = ranks_of(process_group)
    source = same_location(ranks, "loading an optimizer", path, verify=verify)
    found = open_everywhere(ranks, source, verify)

    def read(wanted: ShardedStateDict) -> object:
        return carry_out_load(ranks, ShardedLoadPlanner(wanted, found), verify=verify)

    return fill_optimizer(model, optimizer, found, read, ranks=ranks, at=at, on_conflict=on_conflict, override=override)


def fill_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    opened: Opened,
    read: Callable[[ShardedStateDict], object],
    *,
    ranks: Ranks,
    at: tuple[str, ...] = ("optimizer",),
    on_conflict: Conflict = "error",
    override: Mapping[str, Any] = NO_OVERRIDE,
) -> OptimizerLoadReport:
    """`load_optimizer` from an open checkpoint, or from this rank's part of it, of which `read` loads tensors."""
    path = opened.index.path
    prepared: list[tuple[SavedOptimizer, list[_Named], dict[str, dict[str, Tensor]]]] = []

    def set_groups(param_groups: list[dict[str, Any]]) -> GroupReport:
        saved, named, _ = prepared[0]
        names, stored = _names_by_group(optimizer, named), {"groups": saved.groups, "names": saved.names}
        return apply_saved_groups(param_groups, names, stored, on_conflict=on_conflict, override=override)

    def prepare() -> None:
        named = list(_named(model, optimizer))
        saved = with_current_names(find_optimizer(opened, at), [member.name for member in named])
        prepared.append((saved, named, {member.name: _fresh_state(member, opened.index, saved) for member in named}))
        set_groups(_copied(optimizer.param_groups))  # finds errors before changes

    from_all(ranks, prepare, f"preparing to load the optimizer from {path}")
    saved, named, fresh = prepared[0]
    _warn_of_another_class(optimizer, saved, path)
    wanted = {
        f"{member.name}/{state_name}": _described(member, saved.keys[member.name][state_name], tensor, ranks.rank)
        for member in named
        for state_name, tensor in fresh[member.name].items()
    }
    read(wanted)
    state = {member.param: {**fresh[member.name], **saved.plain_state.get(member.name, {})} for member in named}
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        groups = set_groups(optimizer.param_groups)
        for param, states in state.items():  # the last step, and it cannot fail
            optimizer.state.pop(param, None)
            if states:
                optimizer.state[param] = states
    else:
        copied = _copied(optimizer.param_groups)
        groups, params = set_groups(copied), [member.param for member in named]
        numbers = itertools.count()
        packed = {
            "state": {i: state[param] for i, param in enumerate(params) if state[param]},
            "param_groups": [{**group, "params": [next(numbers) for _ in group["params"]]} for group in copied],
        }
        what = f"{type(optimizer).__name__}.load_state_dict of what {path} holds"
        from_all(ranks, lambda: optimizer.load_state_dict(packed), what)
    return OptimizerLoadReport(
        groups=groups,
        uninitialised=tuple(member.name for member in named if not saved.state_names.get(member.name)),
        gone=tuple(n for n, states in saved.state_names.items() if states and n not in fresh),
    )


def _copied(param_groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in group.items()} for group in param_groups]


def _warn_of_another_class(optimizer: Optimizer, saved: SavedOptimizer, path: Location) -> None:
    """Warn if saved groups have hyperparameters that this optimizer lacks, as those of AdamW for Muon."""
    known = {field for group in optimizer.param_groups for field in group}
    unknown = sorted({field for group in saved.groups for field in group} - known)
    if unknown:
        states = sorted({name for own in saved.state_names.values() for name in own})
        text = f"it has {', '.join(unknown)} in its groups, and the states {', '.join(states)}"
        logger.warning("%s was saved by a different optimizer than %s: %s", path, type(optimizer).__name__, text)


def _fresh_state(member: _Named, index: CheckpointIndex, saved: SavedOptimizer) -> dict[str, Tensor]:
    """New memory for the stored states of one parameter, in their stored dtypes, laid out like the parameter."""
    then, now = saved.param_shapes.get(member.name), list(member.param.shape)
    if then is not None and saved.state_names.get(member.name) and list(then) != now:
        raise CheckpointMismatchError(f"{member.name} has shape {now}, but its state was saved for shape {list(then)}")
    fresh = {}
    for state_name, key in saved.keys.get(member.name, {}).items():
        stored = index.tensors[key]
        local = local_tensor(member.param.detach())
        if is_dtensor(member.param) and stored.shape not in ((), tuple(member.param.shape)):
            fresh[state_name] = empty_like_sharded(member.param, stored.shape, stored.dtype)
        elif stored.shape == tuple(member.param.shape) and state_name != "step":
            memory = torch.empty_like(local, dtype=stored.dtype)  # every element is read, or the load raises
            fresh[state_name] = like_sharded(member.param.detach(), memory)
        else:
            # torch's optimizers keep the step count on the host unless they are captured or fused.
            on_device = stored.shape or member.group.get("capturable") or member.group.get("fused")
            device = local.device if on_device else "cpu"
            fresh[state_name] = torch.empty(stored.shape, dtype=stored.dtype, device=device)
    return fresh
