"""The optimizer's state in the form of Megatron-Core's optimizers, for its `dist_checkpointing.save` and `load`.

Its tensors have Megatron-Core's keys, such as `optimizer.state.exp_avg.<parameter key>`, and flat ranges are cut into
boxes. Parameter groups, the step count and the loss scale are where Megatron-Core's optimizers look for them: those of
fp32, of 16-bit parameters, or its distributed optimizer in the format `fully_reshardable`. Where it has a chain of
optimizers, for several rules or for experts, each has an entry under its number, with its own groups. Plain values that
only this package has are under `OWN`, in a chain in its first entry. Either side loads what the other has saved.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_checkpoint.dist_checkpointing.megatron import (
    RESHARDABLE,
    Compared,
    compare_end,
    local_object,
    optimizer_entry,
    shifted_of,
    to_megatron,
)
from opt_checkpoint.state import FlatState, flatten_state
from opt_config import ConfigError, OptimizerConfig
from opt_distributed.pieces import AVERAGES
from opt_distributed.saving import MAIN, STEP
from opt_kernels.params import CHOICES, HELD, HOOKS, RULE, Group
from opt_paramgroups import ParamGroup
from opt_stack.rules.entries import ParamGroups
from opt_stack.state import AnyState
from opt_stack.wording import logger

OWN = "opt_stack"
SPIKES = "spikes"  # in a state: the norms and losses of the last steps, with `skip_sigma`
AVOID_PREFIX = "chained_optim_avoid_prefix"  # in that metadata: keys do not begin with `chained_<number>.`
SHARDING_TYPE = "distrib_optim_sharding_type"  # in the metadata of Megatron-Core's callers
_IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "start_wd", "end_wd")
_IF_SAVED = (RULE, "max_lr", "min_lr")  # identifiers of some releases only
_UNCOUNTED = ("sgd", "muon", "adaptive_muon", "lion")  # rules whose optimizers there count no steps
_FORMS = {
    "fp32": "an optimizer of fp32 parameters",
    "mixed": "an optimizer of 16-bit parameters without the distributed optimizer",
    "distributed": f"the distributed optimizer in the format {RESHARDABLE}",
}


class Link(NamedTuple):
    """One of Megatron-Core's optimizers in a chain, or its only one."""

    form: str
    groups: list[int]  # the numbers of its groups


class Request(NamedTuple):
    """What a state describes; its own load gets it back."""

    chain: Sequence[Link]
    flat: FlatState
    boxes: list[list[Tensor]]  # of each tensor of `flat`: views of its memory


def form_of(config: OptimizerConfig, metadata: dict[str, Any] | None, *, is_loading: bool) -> str:
    """Return the form that Megatron-Core's optimizer of this configuration has.

    A save is always `fully_reshardable`, without prefixes, and says so in `metadata`, which is stored with the
    checkpoint.

    Raises:
        ConfigError: a load of another format of the distributed optimizer.
    """
    if metadata is None:
        return _undistributed(config)
    if not is_loading:
        metadata[AVOID_PREFIX] = True
    given = metadata.get(SHARDING_TYPE)
    if given is None:
        return _undistributed(config)
    if given != RESHARDABLE and is_loading:
        raise ConfigError(
            f"the checkpoint was saved with {SHARDING_TYPE}={given!r}, whose states are parts of Megatron-Core's "
            f"buffers; only {RESHARDABLE!r} is loaded: save it in Megatron-LM with "
            "--dist-ckpt-optim-fully-reshardable, or convert it with `optckpt convert`"
        )
    if given != RESHARDABLE:
        logger.info("the optimizer is saved with %s=%r, not %r", SHARDING_TYPE, RESHARDABLE, given)
        metadata[SHARDING_TYPE] = RESHARDABLE
    return "distributed"


def chain_of(config: OptimizerConfig, form: str, param_groups: ParamGroups, *, shards_buffers: bool) -> list[Link]:
    """Return Megatron-Core's optimizers: one for each rule, that of the configuration first, dense before experts.

    The layer-wise optimizer has experts too, and keeps whole tensors: of all rules, or, if `shards_buffers`, as the
    wrapper does with `use_distributed_optimizer`, of its own, beside a distributed optimizer for the others.
    """
    is_whole = config.use_layer_wise_distributed_optimizer
    numbers: dict[tuple[bool, bool, str], list[int]] = {}
    for number, group in enumerate(param_groups):
        is_expert = group["is_expert_parallel"] and not is_whole
        key = group[RULE] != config.optimizer, is_expert, group[RULE]
        numbers.setdefault(key, []).append(number)
    chain = []
    for (is_other, *_), of_link in sorted(numbers.items()):
        is_undistributed = is_whole and form == "distributed" and not (is_other and shards_buffers)
        chain.append(Link(_undistributed(config) if is_undistributed else form, of_link))
    return chain or [Link(form, [])]


def _undistributed(config: OptimizerConfig) -> str:
    return "mixed" if config.bf16 or config.fp16 else "fp32"


def to_megatron_state(
    state: AnyState,  # of `sharded_state_dict`, in the form of this package
    chain: Sequence[Link],
    param_groups: ParamGroups,
    steps: Mapping[str, int],  # of the parameters on all ranks
) -> dict[Any, Any]:
    """Return `state` in Megatron-Core's form."""
    described = {
        at: {name: value for name, value in of_param.items() if name != STEP} for at, of_param in state["state"].items()
    }
    names = state["groups"]["names"]
    of_distributed = [number for link in chain if link.form == "distributed" for number in link.groups]
    distributed = {name for number in of_distributed for name in names[number]}  # parameters
    flat = flatten_state({"state": described})
    stored = {}
    boxes = []
    for number, (path, shard) in enumerate(flat.tensors.items()):
        key = shard.key
        if _param_name(str(path[1])) in distributed:  # its name of the main values
            key = key.replace(f"optimizer.state.{MAIN}.", "optimizer.state.param.", 1)
        tensors = to_megatron(replace(shard, key=key))
        boxes.append([tensor.data for tensor in tensors])
        if tensors:
            stored[number] = dict(enumerate(tensors))
    # Megatron-Core has one step count. Where ours differ there is none, so that it refuses the checkpoint.
    counts = set(steps.values())
    common = counts.pop() if len(counts) == 1 else None
    request = local_object(Request(chain, flat, boxes))
    needs_steps = common is None or len(chain) > 1
    own = {
        "version": state["version"],
        "groups": state["groups"],
        "steps": dict(sorted(steps.items())) if needs_steps else {},
        "tensors": stored,
        "request": request,
    }
    if SPIKES in state:
        own[SPIKES] = state[SPIKES]
    entries = []
    first_rule = next((param_groups[at][RULE] for at in chain[0].groups), "")  # which Megatron-Core does not name
    for link in chain:
        groups = [param_groups[at] for at in link.groups]
        is_counted = len(chain) == 1 or groups[0][RULE] not in _UNCOUNTED
        step = common if is_counted else None
        written = [_megatron_group(group, step, unnamed=first_rule) for group in groups]
        entries.append(optimizer_entry(link.form, written, step, state["grad_scaler"]))
    entries[0][OWN] = own
    if len(entries) == 1:
        return entries[0]
    return dict(enumerate(entries))


def _param_name(at: str) -> str:
    """The name of the parameter that has its state at `at`."""
    return at.rpartition(", chunk ")[0] or at


def _megatron_group(group: Group, step: int | None, *, unnamed: str) -> ParamGroup:
    left_out = {*HELD, HOOKS, CHOICES, "name"}
    if group[RULE] == unnamed:
        left_out.add(RULE)
    kept = {}
    for key, value in group.items():
        if key not in left_out:
            kept[key] = value.item() if isinstance(value, Tensor) else value
    return kept if step is None else {**kept, STEP: step}


def from_megatron_state(
    loaded: AnyState, param_groups: ParamGroups, names: Sequence[Collection[str]]
) -> dict[str, Any]:
    """Return a loaded state in the form of this package; writes to the tensors that were described.

    `names` are those of each group's parameters on all ranks.

    Raises:
        ConfigError: it was saved by another kind of optimizer, or has no group or step count for a parameter.
    """
    own = own_values(loaded)
    request: Request = own["request"]
    entries = _entries(loaded)
    forms = [_saved_form(entry) for entry in entries]
    wanted = [link.form for link in request.chain]
    is_own = "version" in own
    if (set(forms) != set(wanted)) if is_own else (forms != wanted):
        raise ConfigError(
            f"the checkpoint holds the state of {_shown(forms)}, and this one is that of {_shown(wanted)}; load it "
            "with the precision and the optimizer that saved it, or convert it with `optckpt convert`"
        )
    inners = [entry if form == "fp32" else entry["optimizer"] for entry, form in zip(entries, forms, strict=True)]
    if is_own:
        groups = own["groups"]
        steps = own["steps"]
        if not steps:
            step = _common_step(inners[0], inners[0]["param_groups"][0])
            steps = {name: step for of_group in names for name in of_group}
    else:
        # Megatron-Core saved groups of its own, and a step count for all parameters of an optimizer.
        steps = {}
        by_number = {}
        for link, inner in zip(request.chain, inners, strict=True):
            for number in link.groups:
                group = param_groups[number]
                saved = _match(group, inner["param_groups"])
                flags = [str(choice).partition("=")[0] for choice in group.get(CHOICES) or ()]
                choices = tuple(f"{name}={saved[name]}" for name in flags if name in saved)
                kept = {
                    key: saved[key] for key in saved if key in group and key not in (*HELD, "name", "default_config")
                }
                by_number[number] = {**kept, CHOICES: choices}
                if of_group := names[number]:
                    steps |= dict.fromkeys(of_group, _common_step(inner, saved, rule=group[RULE], chain=inners))
        in_order = [by_number[number] for number in range(len(param_groups))]
        groups = {"groups": in_order, "names": list(map(list, names))}
    missing = _take_tensors_(request, own.get("tensors", {}))
    state = request.flat.assembled({}, {}, frozenset(missing)).get("state", {})
    unknown = {path[1] for path in missing if path[2] not in (MAIN, *AVERAGES)}
    for at, of_param in state.items():
        count = steps.get(at, steps.get(_param_name(at)))
        if count is not None and at not in unknown:
            of_param[STEP] = torch.tensor(count, dtype=torch.int64, device="cpu")
    return {
        "state": state,
        "groups": groups,
        "grad_scaler": entries[0].get("grad_scaler"),
        SPIKES: own.get(SPIKES),
    }


def _take_tensors_(request: Request, tensors: Mapping[int, Mapping[int, Tensor]]) -> set[tuple[str | int, ...]]:
    """Write loaded tensors to those that were described. Return the paths of the tensors that were not loaded."""
    missing = set()
    for number, (path, views) in enumerate(zip(request.flat.tensors, request.boxes, strict=True)):
        for index, view in enumerate(views):
            value = tensors.get(number, {}).get(index)
            if value is None:
                missing.add(path)
            elif value.data_ptr() != view.data_ptr():
                view.copy_(value)
    return missing


def own_values(loaded: Mapping[Any, Any]) -> dict[str, Any]:
    """Return what is under `OWN` in a loaded state; nothing in a state of another form."""
    first = loaded.get(0)
    places = (loaded, first if isinstance(first, Mapping) else {})
    return {key: value for place in places for key, value in place.get(OWN, {}).items()}


def has_distributed_form(loaded: Mapping[Any, Any]) -> bool:
    """Return whether Megatron-Core saved this, and its distributed optimizer a part of it."""
    return "version" not in own_values(loaded) and "distributed" in map(_saved_form, _entries(loaded))


def compare_mains(state: AnyState, weights: Mapping[str, Tensor]) -> list[Compared]:
    """Compare loaded main weights with the 1-D `weights`, which the same load has set, if these have 16 bits."""
    compared = []
    for at, weight in weights.items():
        main = state.get(at, {}).get(MAIN)
        if main is not None and weight.dtype.itemsize == 2:
            compared.append(compare_end(at, main.reshape(-1), weight))
    return compared


def check_mains(compared: Collection[Compared]) -> None:
    """Raise ConfigError if these main weights, of all ranks, are shifted."""
    if shifted := shifted_of(compared):
        raise ConfigError(
            f"the checkpoint holds states of {len(shifted)} parameters at shifted places ({', '.join(shifted[:4])}): "
            "these main weights do not round to the weights beside them. Megatron-Core up to 0.19.2 writes such "
            "fully_reshardable directories if a buffer has several buckets. The weights are right: start the optimizer "
            "anew (Megatron-LM's --no-load-optim), or save again with one bucket"
        )


def _entries(loaded: Mapping[Any, Any]) -> list[AnyState]:
    """The state of each of Megatron-Core's optimizers."""
    numbers = sorted(key for key in loaded if isinstance(key, int))
    is_chain = numbers and not {"param_state_sharding_type", "param_groups", "optimizer"} & loaded.keys()
    if not is_chain:
        return [loaded]
    return [loaded[number] for number in numbers]


def _saved_form(loaded: AnyState) -> str:
    if "param_state_sharding_type" in loaded:
        found = loaded["param_state_sharding_type"]
        return "distributed" if found == RESHARDABLE else f"the distributed optimizer in the format {found}"
    if "param_groups" in loaded:
        return "fp32"
    return "mixed" if "optimizer" in loaded else "no optimizer that is known here"


def _shown(forms: Sequence[str]) -> str:
    return ", ".join(_FORMS.get(form, form) for form in forms) + (", in a chain" if len(forms) > 1 else "")


def _match(group: Group, saved_groups: ParamGroups) -> Group:
    """Return the saved group of Megatron-Core with the same identifiers."""

    def fits(saved: Group) -> bool:
        keys = (*_IDENTIFIERS, *(key for key in _IF_SAVED if saved.get(key) is not None))
        return all(saved.get(key, saved.get(f"pre_{key}")) == group.get(key) for key in keys)

    found = [saved for saved in saved_groups if fits(saved)]
    if len(found) != 1:
        shown = {key: group.get(key) for key in (*_IDENTIFIERS, *_IF_SAVED)}
        raise ConfigError(
            f"{len(found)} saved groups of Megatron-Core have the identifiers of group {group['name']!r}, {shown}; "
            "build the optimizer with the rates, decays and overrides of the run that saved them"
        )
    return found[0]


def _common_step(inner: AnyState, saved: Group, *, rule: str = "", chain: Sequence[AnyState] = ()) -> int:
    """The step count of a group: of its optimizer, or, if that counts none, of another in the chain."""
    found = [inner.get("state", {}).get("common_step"), saved.get(STEP)]
    if rule in _UNCOUNTED:
        for other in chain:
            found += [other.get("state", {}).get("common_step"), *(group.get(STEP) for group in other["param_groups"])]
        found.append(0)
    count = next((step for step in found if step is not None), None)
    if count is None:
        raise ConfigError("the checkpoint has no step count of the optimizer; save it after its first step")
    return int(count)
