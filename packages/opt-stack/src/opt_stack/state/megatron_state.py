"""The optimizer's state in the form of Megatron-Core's optimizers, for its `dist_checkpointing.save` and `load`.

Its tensors have Megatron-Core's keys, such as `optimizer.state.exp_avg.<parameter key>`, and flat ranges are cut into
boxes. Parameter groups, the step count and the loss scale are where Megatron-Core's optimizers look for them: those of
fp32, of 16-bit parameters, or its distributed optimizer in the format `fully_reshardable`. Plain values that only this
package has are under `OWN`. Either side loads what the other has saved.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_checkpoint.dist_checkpointing.megatron import (
    Compared,
    compare_end,
    local_object,
    shifted_of,
    to_megatron,
)
from opt_checkpoint.state import FlatState, flatten_state
from opt_config import ConfigError, OptimizerConfig
from opt_distributed.saving import MAIN, STEP
from opt_kernels.params import CHOICES, HELD, HOOKS, RULE
from opt_stack.rules.entries import Group

logger = logging.getLogger("opt_stack")
OWN = "opt_stack"
SPIKES = "spikes"  # in a state: the norms and losses of the last steps, with `skip_sigma`
RESHARDABLE = "fully_reshardable"
SHARDING_TYPE = "distrib_optim_sharding_type"  # in the metadata of Megatron-Core's callers
_IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "start_wd", "end_wd")
_IF_SAVED = (RULE, "max_lr", "min_lr")  # identifiers of some releases only
_FORMS = {
    "fp32": "an optimizer of fp32 parameters",
    "mixed": "an optimizer of 16-bit parameters without the distributed optimizer",
    "distributed": f"the distributed optimizer in the format {RESHARDABLE}",
}


class Request(NamedTuple):
    """What a state describes; its own load gets it back."""

    form: str
    flat: FlatState
    boxes: list[list[Tensor]]  # of each tensor of `flat`: views of its memory


def form_of(config: OptimizerConfig, metadata: dict[str, Any] | None, *, is_loading: bool) -> str:
    """Return the form that Megatron-Core's optimizer of this configuration has.

    A save is always `fully_reshardable`, and says so in `metadata`, which is stored with the checkpoint.

    Raises:
        ConfigError: a load of another format of the distributed optimizer.
    """
    given = (metadata or {}).get(SHARDING_TYPE)
    if given is None:
        return "mixed" if config.bf16 or config.fp16 else "fp32"
    if given != RESHARDABLE and is_loading:
        raise ConfigError(
            f"the checkpoint was saved with {SHARDING_TYPE}={given!r}, whose states are parts of Megatron-Core's "
            f"buffers; only {RESHARDABLE!r} is loaded: save it in Megatron-LM with "
            "--dist-ckpt-optim-fully-reshardable, or convert it with `optckpt convert`"
        )
    if metadata is not None and given != RESHARDABLE:
        logger.info("the optimizer is saved with %s=%r, not %r", SHARDING_TYPE, RESHARDABLE, given)
        metadata[SHARDING_TYPE] = RESHARDABLE
    return "distributed"


def to_megatron_state(
    state: Mapping[str, Any],  # of `sharded_state_dict`, in the form of this package
    form: str,
    param_groups: Sequence[Group],
    steps: Mapping[str, int],  # of the parameters on all ranks
) -> dict[str, Any]:
    """Return `state` in Megatron-Core's form."""
    described = {}
    for at, of_param in state["state"].items():
        described[at] = {name: value for name, value in of_param.items() if name != STEP}
    flat = flatten_state({"state": described})
    stored: dict[int, dict[int, Any]] = {}
    boxes = []
    for number, shard in enumerate(flat.tensors.values()):
        key = shard.key
        if form == "distributed":  # its name of the main values
            key = key.replace(f"optimizer.state.{MAIN}.", "optimizer.state.param.", 1)
        tensors = to_megatron(replace(shard, key=key))
        boxes.append([tensor.data for tensor in tensors])
        if tensors:
            stored[number] = dict(enumerate(tensors))
    # Megatron-Core has one step count. Where ours differ there is none, so that it refuses the checkpoint.
    counts = set(steps.values())
    common = counts.pop() if len(counts) == 1 else None
    request = local_object(Request(form, flat, boxes))
    own = {
        "version": state["version"],
        "groups": state["groups"],
        "steps": dict(steps) if common is None else {},
        "tensors": stored,
        "request": request,
    }
    if SPIKES in state:
        own[SPIKES] = state[SPIKES]
    groups = [_megatron_group(group, common, param_groups) for group in param_groups]
    inner: dict[str, Any] = {"param_groups": groups}
    if form != "distributed":
        inner["state"] = {} if common is None else {"common_step": _fp32(float(common))}
    whole: dict[str, Any] = dict(inner) if form == "fp32" else {"optimizer": inner}
    if form == "distributed":
        whole["param_state_sharding_type"] = RESHARDABLE
    if scaler := state["grad_scaler"]:
        whole["grad_scaler"] = {**scaler, "scale": _fp32([float(scaler["scale"])])}
    return {**whole, OWN: own}


def _fp32(value: float | list[float]) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def _megatron_group(group: Group, step: int | None, groups: Sequence[Group]) -> dict[str, Any]:
    left_out = {*HELD, HOOKS, CHOICES, "name"}
    if len({each.get(RULE) for each in groups}) == 1:  # Megatron-Core names rules only where there are several
        left_out.add(RULE)
    kept = {}
    for key, value in group.items():
        if key not in left_out:
            kept[key] = value.item() if isinstance(value, Tensor) else value
    return kept if step is None else {**kept, STEP: step}


def from_megatron_state(
    loaded: Mapping[str, Any], param_groups: Sequence[Group], names: Sequence[Collection[str]]
) -> dict[str, Any]:
    """Return a loaded state in the form of this package; writes to the tensors that were described.

    `names` are those of each group's parameters on all ranks.

    Raises:
        ConfigError: it was saved by another kind of optimizer, or has no group or step count for a parameter.
    """
    own = loaded[OWN]
    request: Request = own["request"]
    saved_form = _saved_form(loaded)
    if saved_form != request.form:
        raise ConfigError(
            f"the checkpoint holds the state of {_FORMS.get(saved_form, saved_form)}, and this one is that of "
            f"{_FORMS[request.form]}; load it with the precision and the optimizer that saved it, or convert it with "
            "`optckpt convert`"
        )
    inner = loaded if saved_form == "fp32" else loaded["optimizer"]
    if "version" in own:
        groups = own["groups"]
        steps = own["steps"]
        if not steps:
            step = _common_step(inner, inner["param_groups"][0])
            steps = {name: step for of_group in names for name in of_group}
    else:
        steps = {}
        own_groups = []
        for group, of_group in zip(param_groups, names, strict=True):
            saved = _match(group, inner["param_groups"])
            own_groups.append(_own_group(group, saved))
            if of_group:
                steps |= dict.fromkeys(of_group, _common_step(inner, saved, rule=group.get(RULE)))
        groups = {"groups": own_groups, "names": list(map(list, names))}
    missing = _fill_(request, own.get("tensors", {}))
    state = request.flat.assembled({}, {}, missing).get("state", {})
    unknown = {path[1] for path in missing if path[2] != MAIN}
    for at, of_param in state.items():
        name = at.rpartition(", chunk ")[0] or at
        count = steps.get(at, steps.get(name))
        if count is not None and at not in unknown:
            of_param[STEP] = torch.tensor(count, dtype=torch.int64, device="cpu")
    return {
        "state": state,
        "groups": groups,
        "grad_scaler": loaded.get("grad_scaler"),
        SPIKES: own.get(SPIKES),
    }


def has_distributed_form(loaded: Mapping[str, Any]) -> bool:
    """Return whether Megatron-Core's distributed optimizer saved this."""
    return "version" not in loaded[OWN] and _saved_form(loaded) == "distributed"


def compare_mains(state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> list[Compared]:
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


def _saved_form(loaded: Mapping[str, Any]) -> str:
    if "param_state_sharding_type" in loaded:
        found = loaded["param_state_sharding_type"]
        return "distributed" if found == RESHARDABLE else f"the distributed optimizer in the format {found}"
    if "param_groups" in loaded:
        return "fp32"
    if "optimizer" in loaded:
        return "mixed"
    return "several optimizers of Megatron-Core (layer-wise, experts, or Muon beside Adam)"


def _match(group: Group, saved_groups: Sequence[Group]) -> Group:
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


def _own_group(group: Group, saved: Group) -> dict[str, Any]:
    """Return the entries of a saved group that the present one has, and its flags as choices of the formula."""
    names = [str(choice).partition("=")[0] for choice in group.get(CHOICES) or ()]
    choices = tuple(f"{name}={saved[name]}" for name in names if name in saved)
    kept = {key: saved[key] for key in saved if key in group and key not in (*HELD, "name", "default_config")}
    return {**kept, CHOICES: choices}


def _common_step(inner: Mapping[str, Any], saved: Group, *, rule: str | None = None) -> int:
    step = inner.get("state", {}).get("common_step")
    if step is None:
        step = saved.get(STEP)
    if step is None and rule == "sgd":
        return 0  # its formula counts no steps, and torch's SGD has no count
    if step is None:
        raise ConfigError("the checkpoint has no step count of the optimizer; save it after its first step")
    return int(step)


def _fill_(request: Request, tensors: Mapping[int, Mapping[int, Tensor]]) -> frozenset[tuple[str | int, ...]]:
    """Write loaded tensors to the memory that was described, and return the paths of those that are missing."""
    missing = set()
    for number, (path, views) in enumerate(zip(request.flat.tensors, request.boxes, strict=True)):
        for index, view in enumerate(views):
            value = tensors.get(number, {}).get(index)
            if value is None:
                missing.add(path)
            elif value.data_ptr() != view.data_ptr():
                view.copy_(value)
    return frozenset(missing)
