"""Saves and loads the state of any `torch.optim` optimizer under FSDP2, tensor parallelism or plain DDP.

Keys are `optimizer.state.<state name>.<parameter name>`, as if the optimizer were not sharded. State that does not
exist yet is created in its stored dtype, never by a step with artificial gradients. An optimizer that overrides
`state_dict` and `load_state_dict` is saved and loaded in the form of its state_dict (as codes, as local shards).
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from opt_checkpoint.dcp.layout import fingerprint
from opt_checkpoint.dcp.load_planner import ShardedLoadPlanner
from opt_checkpoint.dcp.names import some_of
from opt_checkpoint.dcp.reader import Verify
from opt_checkpoint.disk.checkpoint import Opened
from opt_checkpoint.disk.index import CheckpointIndex
from opt_checkpoint.errors import CheckpointKeyError, CheckpointMismatchError, CheckpointValueError
from opt_checkpoint.run.named_model import sharded_model
from opt_checkpoint.run.optimizer_params import NamedParam, named_params, names_by_group, on_all_ranks
from opt_checkpoint.run.ranks import Ranks, from_all, on_all, own_and_distinct, ranks_of, same_location
from opt_checkpoint.run.save_load import carry_out_load, opened_everywhere
from opt_checkpoint.run.saved_optimizer import PREFIX, ByParam, SavedOptimizer, find_optimizer, with_current_names
from opt_checkpoint.state.groups import Conflict, Group, GroupReport, apply_saved_groups, groups_to_saved
from opt_checkpoint.state.sharded import EMPTY, ShardedBase, ShardedStateDict
from opt_checkpoint.state.tensors import empty_like_sharded, is_dtensor, local_tensor
from opt_checkpoint.state.tree import ScopedState
from opt_checkpoint.store import AnyPath, Location

logger = logging.getLogger(__name__)
OPTIMIZER = "optimizer."
T = TypeVar("T")


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


def sharded_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    process_group: dist.ProcessGroup | None = None,
    groups: Any = None,
) -> ShardedStateDict:
    """Return an optimizer's state and groups as a sharded state: `save({"optimizer": sharded_optimizer(model, opt)},
    path)`.

    A parameter without a state, which never had a gradient, is recorded as such.

    Args:
        model: contains every parameter of the optimizer.
        optimizer: any torch optimizer whose states have the layout of their parameter, or are equal on all ranks. It
            must not have changed at the save, so describe it before each.
        process_group: the ranks that hold the same plain tensors; None for all.
        groups: process groups by role, as for `sharded_model`, if ranks have different parts of the model. Then this is
            collective: all ranks call it.

    Raises:
        CheckpointingException: a parameter has no name in the model, or a state is neither.
    """
    rank = ranks_of(process_group).rank
    of_model = None if groups is None else sharded_model(model, groups=groups)

    def describe() -> tuple[ByParam[ShardedBase], _Recorded]:
        return _states_of(named_params(model, optimizer, of_model), optimizer, rank)

    if groups is None:
        tensors, recorded = describe()
        per_rank = [recorded]
    else:
        recorded_of = lambda described: described[1]
        (tensors, _), per_rank = own_and_distinct(ranks_of(None), describe, recorded_of, "describing an optimizer")
    plain_states, state_names, shapes, names = zip(*per_rank)
    parts = {
        "state": tensors,
        "plain_state": _joined(plain_states),
        "state_names": _joined(state_names),
        "param_shapes": _joined(shapes),
        **groups_to_saved(optimizer.param_groups, on_all_ranks(names)),
    }
    copied = _copied_values(optimizer)

    def check(_: bool) -> None:
        if _copied_values(optimizer) != copied:
            raise CheckpointValueError(
                f"the groups or states of {type(optimizer).__name__} have changed since sharded_optimizer described "
                f"them; call sharded_optimizer(model, optimizer) before each save"
            )

    return ScopedState(parts, replaces=OPTIMIZER, check=check)


class _Recorded(NamedTuple):
    """What is stored about a rank's parameters besides tensors: states that are numbers, names and shapes by name."""

    plain_state: ByParam[Any]
    state_names: dict[str, list[str]]
    param_shapes: dict[str, list[int]]
    names: list[list[str]]


def _states_of(
    members: Sequence[NamedParam], optimizer: Optimizer, rank: int
) -> tuple[ByParam[ShardedBase], _Recorded]:
    tensors: ByParam[ShardedBase] = defaultdict(dict)
    plain: ByParam[Any] = defaultdict(dict)
    states: Mapping[Tensor, Mapping[str, Any]] = optimizer.state
    if type(optimizer).state_dict is not Optimizer.state_dict:  # in another form, such as codes
        params = [member.param for member in members]
        states = {params[index]: values for index, values in optimizer.state_dict()["state"].items()}
    for member in members:
        for state_name, value in states.get(member.param, {}).items():
            if isinstance(value, Tensor):
                key = f"{PREFIX}{state_name}.{member.name}"
                kind = type(local_tensor(value))
                if kind not in (Tensor, nn.Parameter):
                    raise CheckpointValueError(
                        f"{key} is a {kind.__name__}, a subclass of Tensor, which a load could not make again; use an "
                        f"optimizer whose state is plain tensors or whose state_dict() returns them, such as "
                        f"opt_kernels.AdamW for 8-bit states"
                    )
                tensors[member.name][state_name] = member.describe(key, value, rank)
            else:
                plain[member.name][state_name] = value
    state_names = {member.name: sorted(states.get(member.param, {})) for member in members}
    shapes = {member.name: list(member.shape) for member in members}
    return dict(tensors), _Recorded(dict(plain), state_names, shapes, names_by_group(optimizer, members))


def _joined(per_rank: Sequence[Mapping[str, T]]) -> dict[str, T]:
    """What the ranks recorded, by name.

    Raises:
        CheckpointValueError: two ranks recorded different values for one parameter.
    """
    joined: dict[str, T] = {}
    for rank, recorded in enumerate(per_rank):
        for name, value in recorded.items():
            first = joined.setdefault(name, value)
            if first is not value and fingerprint(first) != fingerprint(value):
                raise CheckpointValueError(
                    f"rank {rank} has {value!r:.80} for {name}, and a rank before it {first!r:.80}; ranks with "
                    f"parts or copies of one parameter must have the same states"
                )
    return joined


def _copied_values(optimizer: Optimizer) -> tuple[int, int]:
    """Two numbers for everything that a description copies, to find out later whether it has changed.

    Tensors of state are shared, so it is the tensors that count; of an optimizer with a `state_dict` of another form,
    which are copied, the step counts.
    """
    is_shared = type(optimizer).state_dict is Optimizer.state_dict
    copied: list[Any] = []
    shared: list[tuple[str, int]] = []
    for group in optimizer.param_groups:
        copied.append({field: value for field, value in group.items() if field != "params"})
        for param in group["params"]:
            for name, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor) and is_shared:
                    shared.append((name, id(value)))
                elif not isinstance(value, Tensor) or not value.dim():
                    copied.append((name, value))
    return fingerprint(copied), hash(tuple(shared))


def load_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    path: AnyPath,
    *,
    at: tuple[str, ...] = ("optimizer",),
    process_group: dist.ProcessGroup | None = None,
    groups: Any = None,
    on_conflict: Conflict = "error",
    override: Mapping[str, Any] = EMPTY,
    verify: Verify = "sizes",
) -> OptimizerLoadReport:
    """Load an optimizer's state and groups, however it was sharded when saved; all ranks call this together.

    Everything is read into new memory first: if this raises, the optimizer is unchanged. State that was saved by
    another class of optimizer is loaded with a warning, because this one may not use it.

    Args:
        model: contains the parameters, under the names that were saved.
        optimizer: its `state` and the fields of its `param_groups` are replaced.
        path: a checkpoint with `sharded_optimizer(...)` in its state; with an optimizer's state dict of
            `torch.distributed.checkpoint.state_dict`, as torchtitan saves it, flattened or not; or a directory of
            Megatron-Core, or converted from one. Their groups name no parameters, so `param_groups` stay as they are,
            and their main weights are not loaded, because a torch optimizer has none.
        at: the keys under which the optimizer is stored, such as `("optim",)`.
        process_group: the ranks that load.
        groups: process groups by role, as for `sharded_optimizer`.
        on_conflict: as for `apply_saved_groups`.
        override: as for `apply_saved_groups`, for example `{"lr": 1e-4}`.
        verify: as for `load`.

    Raises:
        CheckpointKeyError: no optimizer is there, one of its states is incomplete, or it has other parameters only.
        CheckpointMismatchError: a parameter had another shape when its state was saved.
        CheckpointingException: as `load`, and as `apply_saved_groups`.
    """
    ranks = ranks_of(process_group)
    source = same_location(ranks, "loading an optimizer", path, verify=verify)
    with opened_everywhere(ranks, source, verify) as found:

        def read(wanted: ShardedStateDict) -> object:
            return carry_out_load(ranks, ShardedLoadPlanner(wanted, found), verify=verify, checks_states=True)

        return fill_optimizer(
            model,
            optimizer,
            found,
            read,
            ranks=ranks,
            at=at,
            groups=groups,
            on_conflict=on_conflict,
            override=override,
        )


def fill_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    opened: Opened,
    read: Callable[[ShardedStateDict], object],
    *,
    ranks: Ranks,
    at: tuple[str, ...] = ("optimizer",),
    groups: Any = None,
    on_conflict: Conflict = "error",
    override: Mapping[str, Any] = EMPTY,
) -> OptimizerLoadReport:
    """`load_optimizer` from an open checkpoint, or from this rank's part of it, of which `read` loads tensors."""
    path = opened.index.path
    what = f"preparing to load the optimizer from {path}"
    members: list[NamedParam] = []
    of_model = None if groups is None else sharded_model(model, groups=groups)

    def find_members() -> list[list[str]]:
        members.extend(named_params(model, optimizer, of_model))
        return names_by_group(optimizer, members)

    names = [] if groups is None else on_all_ranks(from_all(ranks, find_members, what))

    def set_groups(saved: SavedOptimizer, param_groups: list[Group]) -> GroupReport:
        stored = {"groups": saved.groups, "names": saved.names}
        return apply_saved_groups(param_groups, names, stored, on_conflict=on_conflict, override=override)

    def prepare() -> tuple[SavedOptimizer, ByParam[Tensor]]:
        if groups is None:
            names.extend(find_members())
        own_names = [name for own in names for name in own]
        saved = with_current_names(find_optimizer(opened, at, own_names), own_names)
        if own_names and set(own_names).isdisjoint(saved.params):
            raise CheckpointKeyError(
                f"{path} holds nothing of this optimizer's parameters {some_of(own_names)}; its optimizer has "
                f"{some_of(sorted(saved.params))}. Pass the model under the names that were saved"
            )
        fresh = {member.name: _fresh_state(member, opened.index, saved) for member in members}
        set_groups(saved, _copied(optimizer.param_groups))  # finds errors before changes
        return saved, fresh

    saved, fresh = on_all(ranks, prepare, what)
    _warn_of_another_class(optimizer, saved, path)
    wanted = {}
    for member in members:
        for state_name, tensor in fresh[member.name].items():
            key = saved.keys[member.name][state_name]
            wanted[f"{member.name}/{state_name}"] = member.describe(key, tensor, ranks.rank)
    read(wanted)
    state = {member.param: {**fresh[member.name], **_plain_state(member, saved)} for member in members}
    report = _replace_state(optimizer, state, partial(set_groups, saved), ranks=ranks, path=path)
    known = {name for own in names for name in own}
    uninitialised = tuple(member.name for member in members if not saved.states_of(member.name))
    gone = tuple(name for name in saved.params if saved.states_of(name) and name not in known)
    return OptimizerLoadReport(groups=report, uninitialised=uninitialised, gone=gone)


def _plain_state(member: NamedParam, saved: SavedOptimizer) -> dict[str, Any]:
    """The states of a parameter that are already read; tensors are copied to where torch keeps step counts."""
    plain = saved.plain_state.get(member.name, {})
    return {k: v.to(_step_device(member), copy=True) if isinstance(v, Tensor) else v for k, v in plain.items()}


def _step_device(member: NamedParam) -> torch.device:
    """Torch's optimizers keep the step count on the host unless they are captured or fused."""
    on_device = member.group.get("capturable") or member.group.get("fused")
    return local_tensor(member.param.detach()).device if on_device else torch.device("cpu")


def _replace_state(
    optimizer: Optimizer,
    state: Mapping[nn.Parameter, dict[str, Any]],  # of every parameter, in order
    set_groups: Callable[[list[Group]], GroupReport],
    *,
    ranks: Ranks,
    path: Location,
) -> GroupReport:
    """Give an optimizer its groups and states: at once if it loads as torch does, else by its `load_state_dict`."""
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        report = set_groups(optimizer.param_groups)
        for param, states in state.items():  # the last step, and it cannot fail
            optimizer.state.pop(param, None)
            if states:
                optimizer.state[param] = states
        return report
    copied = _copied(optimizer.param_groups)
    report = set_groups(copied)
    numbers = itertools.count()
    groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in copied]
    packed = {"state": {n: states for n, states in enumerate(state.values()) if states}, "param_groups": groups}
    what = f"{type(optimizer).__name__}.load_state_dict of what {path} holds"
    from_all(ranks, lambda: optimizer.load_state_dict(packed), what)
    return report


def _copied(param_groups: list[Group]) -> list[Group]:
    return [{k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in group.items()} for group in param_groups]


def _warn_of_another_class(optimizer: Optimizer, saved: SavedOptimizer, path: Location) -> None:
    """Warn if saved groups have hyperparameters that this optimizer lacks, as those of AdamW for Muon."""
    known = {field for group in optimizer.param_groups for field in group}
    unknown = sorted({field for group in saved.groups for field in group} - known)
    if unknown:
        states = sorted(set().union(*map(saved.states_of, saved.params)))
        text = f"it has {', '.join(unknown)} in its groups, and the states {', '.join(states)}"
        logger.warning("%s was saved by a different optimizer than %s: %s", path, type(optimizer).__name__, text)


def _fresh_state(member: NamedParam, index: CheckpointIndex, saved: SavedOptimizer) -> dict[str, Tensor]:
    """New memory for the stored states of one parameter, in their stored dtypes, laid out like the parameter."""
    then = saved.param_shapes.get(member.name)
    now = list(member.shape)
    if then is not None and saved.states_of(member.name) and list(then) != now:
        raise CheckpointMismatchError(f"{member.name} has shape {now}, but its state was saved for shape {list(then)}")
    fresh = {}
    param = member.param.detach()
    for state_name, key in saved.keys.get(member.name, {}).items():
        stored = index.tensors[key]
        if is_dtensor(param) and stored.shape not in ((), tuple(param.shape)):
            fresh[state_name] = empty_like_sharded(param, stored.shape, stored.dtype)
        elif stored.shape == member.shape and state_name != "step":
            fresh[state_name] = torch.empty_like(param, dtype=stored.dtype)  # all of it is read, or the load raises
        else:
            device = local_tensor(param).device if stored.shape else _step_device(member)
            fresh[state_name] = torch.empty(stored.shape, dtype=stored.dtype, device=device)
    return fresh
