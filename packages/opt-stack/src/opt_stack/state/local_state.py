"""Match a state dict with an optimizer: in torch's form with its state, a model's with main values."""

import copy
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor, nn

from opt_distributed.pieces import local
from opt_distributed.step import CHOICES, Scaler
from opt_paramgroups import ParamId, dtensor_layout
from opt_stack.rules.entries import HOOKS


def find_values(state_dict: Mapping[str, Any], params: Mapping[ParamId, nn.Parameter]) -> dict[ParamId, Tensor]:
    """Return the value of each parameter in `state_dict`; for a DTensor, this rank's part.

    Raises:
        ValueError: a parameter is missing, or has another shape or layout. All parameters of the model are checked, not
            only those whose state lives on this rank, so all ranks raise for one state dict.
    """
    return {id: _fitting(id, _find(state_dict, id), param) for id, param in params.items()}


def _find(state_dict: Mapping[str, Any], id: ParamId) -> Any:
    chunks = [f"model{id.chunk}", f"model_{id.chunk}", *(["model"] if id.chunk == 0 else [])]
    names = next((state_dict[chunk] for chunk in chunks if isinstance(state_dict.get(chunk), Mapping)), state_dict)
    for name in (id.name, f"module.{id.name}"):
        if name in names:
            return names[name]
    raise ValueError(f"state_dict lacks {id.name!r} of model chunk {id.chunk}; it must hold every trained parameter")


def _fitting(id: ParamId, value: Any, param: nn.Parameter) -> Tensor:
    where = f"state_dict's {id.name!r} of model chunk {id.chunk}"
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} is a {type(value).__name__}; it must be a tensor of shape {tuple(param.shape)}")
    if value.shape != param.shape:
        raise ValueError(f"{where} has shape {tuple(value.shape)}; the parameter's is {tuple(param.shape)}")
    if dtensor_layout(value) != dtensor_layout(param):
        raise ValueError(f"{where} has a different layout than the parameter; pass the result of model.state_dict()")
    return local(value)


logger = logging.getLogger("opt_stack")

Group = Mapping[str, Any]
HELD = ("params", "param_ids", "param_names")  # keys of a group that list its parameters
OF_RULE = (HOOKS, CHOICES)  # keys of a group that record how its rule was built
RULE = "optimizer"  # a group's key that names its rule; groups of torch's optimizers have none
NUMBERS = ("lr", "weight_decay", "eps", "momentum")  # keys of a saved group that must be numbers


def param_name(id: ParamId) -> str:
    """Return a parameter's name in a state dict; in the first chunk, its name in the module."""
    return id.name if id.chunk == 0 else f"model{id.chunk}.{id.name}"


class _RankLocalGroup(dict[str, Any]):
    """A packed group of a state dict that holds only this rank's part. It pickles as an OrderedDict.

    `torch.distributed.checkpoint.state_dict` replaces `params` by names, which do not distinguish the parts of ranks.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params" and any(isinstance(name, str) for name in value):
            raise ValueError(
                "get_optimizer_state_dict: this rank holds a part of the optimizer's state, and the parts of several "
                "ranks cannot be told apart by parameter name; use optimizer.sharded_state_dict with opt_checkpoint to "
                "save and load on any layout, or save optimizer.state_dict() on every rank to load on the same layout"
            )
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)


def packed_groups(groups: Sequence[Group], *, rank_local: bool = False) -> list[dict[str, Any]]:
    """Return groups as torch saves them: `params` are indices over all groups, `param_names` the names at these.

    `param_ids` is None: torch's flattened form needs every key of a group, but nothing reads this one.
    """
    packed, start = [], 0
    for group in groups:
        names = [param_name(id) for id in group["param_ids"]]
        kept = {key: value for key, value in group.items() if key not in HELD}
        indices = list(range(start, start + len(names)))
        of_group = {**kept, "param_ids": None, "params": indices, "param_names": names}
        packed.append(_RankLocalGroup(of_group) if rank_local else of_group)
        start += len(names)
    return packed


def check_form(state_dict: Any, *, version: int, layout_id: str) -> None:
    """Raise ValueError if `state_dict` is not a state dict, has a newer version, or was saved on another layout."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        found = ", ".join(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(f"state_dict needs 'state' and 'param_groups'; it has {found or 'nothing'}")
    saved_version = state_dict.get("version", version)
    if saved_version != version:
        raise ValueError(f"state_dict has version {saved_version!r}; this release reads version {version} only")
    layouts = _layouts(state_dict) if "layout" in state_dict else [layout_id]
    if layout_id not in layouts:
        raise ValueError(
            f"state_dict was saved on layout {'; '.join(layouts)}, but this optimizer has {layout_id}; use "
            "sharded_state_dict with opt_checkpoint, which loads on any layout"
        )


def _layouts(state_dict: Group) -> list[str]:
    layouts = state_dict.get("layout", ())
    return [layouts] if isinstance(layouts, str) else list(map(str, layouts))


def match_groups(state_dict: Group, groups: Sequence[Group]) -> list[Group]:
    """Return the saved group of each of `groups`: by name if saved groups have names, else by position.

    Raises ValueError if groups, their sizes or rules differ, or a hyper-parameter is not a number.
    """
    saved = list(state_dict["param_groups"])
    if len(saved) != len(groups):
        raise ValueError(f"state_dict has {len(saved)} parameter groups, but this optimizer has {len(groups)}")
    if all("name" in group for group in saved) and not _is_by_name(saved):
        by_name = {group["name"]: group for group in saved}
        missing = [group["name"] for group in groups if group["name"] not in by_name]
        if missing:
            raise ValueError(f"state_dict has no group {missing[0]!r}; it has {', '.join(map(repr, by_name))}")
        saved = [by_name[group["name"]] for group in groups]
    for ours, theirs in zip(groups, saved, strict=True):
        _check_group(ours, theirs)
    return saved


def _is_by_name(saved_groups: Sequence[Group]) -> bool:
    """Return whether `torch.distributed.checkpoint.state_dict` made these groups: in this optimizer's order, with names
    for indices."""
    return any(isinstance(index, str) for group in saved_groups for index in group["params"])


def _check_group(ours: Group, theirs: Group) -> None:
    if len(ours["params"]) != len(theirs["params"]):
        raise ValueError(
            f"group {ours['name']!r} has {len(ours['params'])} parameters, but the saved group {len(theirs['params'])}"
        )
    if theirs.get(RULE, ours[RULE]) != ours[RULE]:
        raise ValueError(
            f"group {ours['name']!r} was saved by optimizer={theirs[RULE]!r}, but is updated by "
            f"optimizer={ours[RULE]!r}, for which state of the same name may mean something else; build the optimizer "
            f"with {theirs[RULE]!r}, or load a sharded_state_dict, which starts from that state with a warning"
        )
    for key in NUMBERS:
        value = theirs.get(key)
        if value is not None and not isinstance(value, Real | Tensor):
            raise ValueError(f"{key}={value!r} of the saved group for {ours['name']!r}: must be a number or a tensor")


def match_state(state_dict: Group, groups: Sequence[Group], saved_groups: Sequence[Group]) -> dict[ParamId, Group]:
    """Return the saved state of each parameter: by name inside its group if names were saved, else by position.

    Raises ValueError if a parameter is not in its saved group, or if a state dict of this class has state of some
    parameters but not of this one.
    """
    is_replicated = any("replicated" in text for text in _layouts(state_dict))
    complete = "version" in state_dict and bool(state_dict["state"]) and is_replicated
    found: dict[ParamId, Group] = {}
    for ours, theirs in zip(groups, saved_groups, strict=True):
        names = [param_name(id) for id in ours["param_ids"]]
        saved_names = names if _is_by_name(saved_groups) else theirs.get("param_names", names)
        index = dict(zip(saved_names, theirs["params"], strict=True))
        for id, name, param in zip(ours["param_ids"], names, ours["params"], strict=True):
            if name not in index:
                raise ValueError(f"parameter {name!r} of group {ours['name']!r} is not in the saved group")
            if index[name] in state_dict["state"]:
                found[id] = state_dict["state"][index[name]]
            elif complete and param.numel():
                raise ValueError(f"state_dict has state of other parameters, but not of {name!r}; it is incomplete")
    return found


def saved_scaler(state_dict: Group, scaler: Scaler) -> dict[str, Any]:
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


def set_group_(group: dict[str, Any], saved: Group) -> None:
    """Copy a saved group's hyper-parameters to `group`, but not `OF_RULE`. Tensors are written in place."""
    for key, value in saved.items():
        if key in HELD or key in OF_RULE:
            continue
        if isinstance(group.get(key), Tensor):
            group[key].fill_(float(value))
        else:
            group[key] = value.clone() if isinstance(value, Tensor) else value
