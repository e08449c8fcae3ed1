"""The optimizer's state as sharded tensors, for checkpoints that load on any number of ranks."""

import copy
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opt_checkpoint import (
    KEEP_VARS_HINT,
    ScopedState,
    ShardedTensor,
    ShardedTensorFactory,
    apply_saved_groups,
    get_param_id_to_sharded_param_map,
    groups_to_saved,
)
from opt_checkpoint.state import NO_OVERRIDE, Conflict, ModelAxes, Replica
from opt_distributed.comm import Axes, Comm, Roles, agree
from opt_distributed.saving import (
    MAIN,
    STEP,
    check_loaded,
    read_piece,
)
from opt_distributed.step import Scaler
from opt_kernels.rules import Rule
from opt_paramgroups import ParamId
from opt_stack.rules.entries import OF_RULE, RULE, check_choices, check_loaded_numbers, warn_of_other_choices
from opt_stack.state.live import Held

logger = logging.getLogger("opt_stack")
VERSION = 1
# The run that loads defines its groups; only their hyper-parameters are restored, if the rule is the same.
_OF_THIS_RUN = frozenset({"params", "param_ids", "name", "default_config", "is_expert_parallel", "is_decoupled_lr"})


class Described(NamedTuple):
    """A parameter of the optimizer and its entry in the model's sharded state."""

    id: ParamId
    name: str  # in the checkpoint's groups; unique over the whole model
    sharded: ShardedTensor | ShardedTensorFactory


def axes_of(roles: Roles) -> ModelAxes:
    """Return the groups over which the model of these roles is divided."""
    instance = roles.instance if roles.dense.inter.size == 1 else None
    return ModelAxes(
        everyone=instance or roles.everyone,
        tp=roles.dense.tp,
        expert_tp=roles.expert.tp,
        ep=roles.ep,
        pp=roles.pp,
        dense=_replica(roles.dense),
        expert=_replica(roles.expert),
    )


def _replica(axes: Axes) -> Replica:
    return Replica(axes.inter.rank * axes.dp.size + axes.dp.rank, axes.num_replicas)


def describe_params(
    model_sharded_state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[list[Described]]:
    """Return the parameters of each group. Marks them in `model_sharded_state_dict` as having main values, so that
    `load` restores exact values in another precision.

    Raises:
        ValueError: a parameter is not in the model's sharded state, or that is of Megatron-Core's own types.
    """
    if any(type(value).__module__.startswith("megatron.core.") for value in tree_leaves(model_sharded_state_dict)):
        raise ValueError(
            "model_sharded_state_dict holds sharded tensors of Megatron-Core; describe the model with "
            "opt_stack.megatron.ShardedTensor and save with opt_checkpoint.save. In Megatron-Bridge, set "
            "checkpoint.ckpt_format='torch'"
        )
    params: list[nn.Parameter] = [param for group in groups for param in group["params"]]
    found = get_param_id_to_sharded_param_map(dict(model_sharded_state_dict), params)
    missing = [index for index in range(len(params)) if index not in found]
    if missing:
        raise ValueError(f"Param id {missing[0]} does not match any model sharded param.{KEEP_VARS_HINT}")
    for sharded in found.values():
        sharded.has_mains = True
    found = {i: s.declared() if isinstance(s, ShardedTensorFactory) else s for i, s in found.items()}
    indices = iter(range(len(params)))
    return [[Described(id, _name(found[i]), found[i]) for id, i in zip(g["param_ids"], indices)] for g in groups]


def check_parts(described: Sequence[Sequence[Described]], held: Mapping[ParamId, Held], everyone: Comm) -> None:
    """Check that parts of one parameter are not all described as the whole of it. Collective.

    Raises:
        ValueError: on every rank, if two tensor-parallel ranks would save their parts as the same tensor.
    """
    local: dict[str, str] = {}  # the part of this rank, by key
    for own in _flat(described):
        part = held[own.id].piece.part if own.id in held else ""
        if part and isinstance(own.sharded, ShardedTensor) and own.sharded.local_shape == own.sharded.global_shape:
            local[own.sharded.key] = part
    per_rank = everyone.gather_objects(local)
    parts: dict[str, set[str]] = defaultdict(set)
    for of_rank in per_rank:
        for key, part in of_rank.items():
            parts[key].add(part)
    wrong = next((key for key, found in parts.items() if len(found) > 1), None)
    if wrong is not None:
        raise ValueError(
            f"parameter {wrong!r} is tensor parallel, and tensor-parallel ranks have different parts of it, "
            "but model_sharded_state_dict describes each part as the whole; pass opt_checkpoint.sharded_model(model), "
            f"or ShardedTensor.from_rank_offsets({wrong!r}, param, (partition_dim, rank, ranks), replica_id=...)"
        )


def sharded_state(
    described: Sequence[Sequence[Described]],
    groups: Sequence[Mapping[str, Any]],
    held: Mapping[ParamId, Held],
    scaler: Scaler,
    everyone: Comm,
) -> dict[str, Any]:
    """Return the state for `opt_checkpoint.save` and `load`. Collective: groups name every rank's parameters."""
    check_parts(described, held, everyone)
    state = {}
    for own, at in _held_entries(described, held):
        state[at] = read_piece(*held[own.id]).sharded(own.sharded)
    kept = [{key: value for key, value in group.items() if key not in _OF_THIS_RUN} for group in groups]
    parts = {
        "version": VERSION,
        "state": state,
        "groups": groups_to_saved(kept, _names_on_all_ranks(described, everyone)),
        "grad_scaler": scaler.state_dict(),
    }
    return ScopedState(parts, replaces="optimizer.")  # one state may hold several optimizers


def load_sharded_(
    loaded: Mapping[str, Any],
    described: Sequence[Sequence[Described]],
    groups: Sequence[dict[str, Any]],
    held: Mapping[ParamId, Held],
    scaler: Scaler,
    everyone: Comm,
    *,
    on_conflict: Conflict = "error",
    override: Mapping[str, Any] = NO_OVERRIDE,
    rules: Mapping[str, Rule],  # of this rank's units, by the groups' `optimizer`
) -> None:
    """Set the optimizer from the result of `opt_checkpoint.load`. Collective.

    Raises:
        ValueError: on every rank, if parameters of one group were saved with different hyper-parameters, a
            hyper-parameter or the loss scale is not valid, or a part of a parameter's state was not loaded. Nothing has
            changed, except tensors that the load itself wrote.
    """
    names = [[own.name for own in of_group] for of_group in described]
    saved = _of_same_rule(loaded["groups"], groups, names)
    pieces = [(held[own.id], loaded["state"].get(at, {})) for own, at in _held_entries(described, held)]
    pieces += [(held[own.id], {}) for own in _flat(described) if own.id in held and _is_empty(own)]
    error: ValueError | None = None
    scale: dict[str, Any] = {}
    try:
        for (unit, piece), values in pieces:
            check_loaded(unit, piece, values)
        untouched = [{key: value for key, value in g.items() if not isinstance(value, Tensor)} for g in groups]
        apply_saved_groups(untouched, names, saved, on_conflict=on_conflict, override=override)
        check_loaded_numbers(zip(groups, untouched, strict=True), rules)
        for group, before in _saved_by_group(loaded["groups"], groups, names):
            check_choices(group, before, rules)
        scale = saved_scaler(loaded, scaler)
    except ValueError as refusal:
        error = refusal
    agree(everyone, error)
    _warn_of_another_rule(loaded, groups, names)
    for group, before in _saved_by_group(loaded["groups"], groups, names):
        warn_of_other_choices(group, before)
    apply_saved_groups(groups, names, saved, on_conflict=on_conflict, override=override)
    for (unit, piece), values in pieces:
        read_piece(unit, piece).take_(values)
    if scale:
        scaler.load_state_dict(scale)


def _warn_of_another_rule(
    loaded: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> None:
    """Log a warning for state of another rule, whose names may have other meanings: SOAP's moments are in its
    eigenbasis."""
    saved = loaded["groups"]
    then = {n: group.get(RULE) for group, own in zip(saved.get("groups", ()), saved.get("names", ())) for n in own}
    moved: dict[tuple[str, str], list[str]] = defaultdict(list)
    for group, own in zip(groups, names, strict=True):
        for name in own:
            before, after = then.get(name), group.get(RULE)
            if before and after and before != after and loaded["state"].get(name, {}).keys() - {STEP, MAIN}:
                moved[before, after].append(name)
    for (before, after), of_params in moved.items():
        logger.warning("%s continues from the state that %s kept for %s", after, before, ", ".join(of_params))


def _saved_by_group(
    saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield each current group with each of the saved groups of its parameters, one for each record of a rule."""
    then = {n: group for group, own in zip(saved.get("groups", ()), saved.get("names", ())) for n in own}
    for group, own in zip(groups, names, strict=True):
        yield from ((group, one) for one in {_record(then[name]): then[name] for name in own if name in then}.values())


def _record(group: Mapping[str, Any]) -> str:
    return str([group.get(key) for key in (RULE, *OF_RULE)])


def _of_same_rule(
    saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return the saved groups without `OF_RULE` and without parameters that another rule updates now, because learning
    rates of one rule do not fit another. Empty if no groups were saved, as in converted checkpoints."""
    now = {name: group.get(RULE) for group, own in zip(groups, names, strict=True) for name in own}
    kept = [
        [name for name in own if RULE not in group or now.get(name) in (None, group[RULE])]
        for group, own in zip(saved.get("groups", ()), saved.get("names", ()), strict=True)
    ]
    without = [{k: value for k, value in group.items() if k not in OF_RULE} for group in saved.get("groups", ())]
    return {"groups": without, "names": kept}


def _held_entries(
    described: Sequence[Sequence[Described]], held: Mapping[ParamId, Held]
) -> Iterator[tuple[Described, str]]:
    """Yield the parameters whose state this rank saves, with a unique name: two model chunks may share a key.

    A parameter without elements has no state on most layouts, so its state is not saved on any.
    """
    places: set[str] = set()
    for own in _flat(described):
        if own.id in held and not _is_empty(own):
            at = f"{own.name}, chunk {own.id.chunk}" if own.name in places else own.name
            places.add(at)
            yield own, at


def _is_empty(own: Described) -> bool:
    return isinstance(own.sharded, ShardedTensor) and not all(own.sharded.global_shape)


def _flat(described: Sequence[Sequence[Described]]) -> Iterator[Described]:
    for of_group in described:
        yield from of_group


def _name(sharded: ShardedTensor | ShardedTensorFactory) -> str:
    """Return the parameter's key, with its index if several layers or experts are stacked under one key."""
    if isinstance(sharded, ShardedTensor) and sharded.prepend_axis_num:
        return f"{sharded.key}/{'.'.join(map(str, sharded.global_offset[: sharded.prepend_axis_num]))}"
    return sharded.key


def _names_on_all_ranks(described: Sequence[Sequence[Described]], everyone: Comm) -> list[list[str]]:
    local = [[own.name for own in of_group] for of_group in described]
    per_rank = everyone.gather_objects(local)
    return [list(dict.fromkeys(name for of_rank in per_rank for name in of_rank[at])) for at in range(len(local))]


def saved_scaler(state_dict: Mapping[str, Any], scaler: Scaler) -> dict[str, Any]:
    """Return the saved loss scale, after loading it into a copy of `scaler`. Raise ValueError if that fails."""
    saved = dict(state_dict.get("grad_scaler") or {})
    if saved and not scaler.state_dict():
        logger.info("the saved loss scale is ignored: this optimizer has a constant one")
        return {}
    try:
        if saved:
            copy.copy(scaler).load_state_dict(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"grad_scaler={saved!r} of the state_dict cannot be loaded: {error!r}") from None
    return saved
