"""The caller's parameter groups: check them against the model, and add the entries that a step reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from opt_config import ConfigError, OptimizerConfig
from opt_paramgroups import ParamId, ParamMeta
from opt_paramgroups.overrides import value_problem
from opt_stack.state.local_state import HELD


def complete_groups(
    param_groups: Sequence[Mapping[str, Any]],
    config: OptimizerConfig,
    params: Mapping[ParamId, nn.Parameter],
    metas: Mapping[ParamId, ParamMeta],
) -> list[dict[str, Any]]:
    """Return new groups with every entry of `get_param_groups`: the caller's value, else the configuration's.
    Parameters of the model that are in no group are not trained.

    Raises:
        ConfigError: a group is not a dict with `params`; a parameter is in two groups, or is not a trainable parameter
            of the model; a group mixes dense parameters and experts; two groups have the same name.
    """
    ids = {id(param): param_id for param_id, param in params.items()}
    names: dict[ParamId, str] = {}  # of the group that has the parameter
    groups = []
    for number, given in enumerate(param_groups):
        if not isinstance(given, Mapping) or "params" not in given:
            raise ConfigError(f"param_groups[{number}] is {type(given).__name__}; must be a dict with 'params'")
        name = given.get("name", f"group {number}")
        held = [given["params"]] if isinstance(given["params"], Tensor) else list(given["params"])
        param_ids = [_id(ids, param, name) for param in held]
        for param_id in param_ids:
            if param_id in names:
                raise ConfigError(
                    f"parameter {str(param_id)!r} is in group {names[param_id]!r} and in {name!r}; it must be in one"
                )
            names[param_id] = name
        _check_values(name, given)
        is_expert = _is_expert(name, [metas[param_id] for param_id in param_ids], given)
        groups.append(
            _completed({**given, "name": name, "params": held}, config) | {"param_ids": param_ids} | is_expert
        )
    all_names = [group["name"] for group in groups]
    if twice := sorted({name for name in all_names if all_names.count(name) > 1}):
        raise ConfigError(
            f"param_groups: two groups have name={twice[0]!r}; names must be unique: checkpoints find groups by name"
        )
    return groups


def _id(ids: Mapping[int, ParamId], param: Any, group: str) -> ParamId:
    if id(param) not in ids:
        shown = f"of shape {tuple(param.shape)}" if isinstance(param, Tensor) else f"{param!r}"
        frozen = ", which is frozen" if isinstance(param, Tensor) and not param.requires_grad else ""
        raise ConfigError(
            f"group {group!r} has a parameter {shown}{frozen}: it is not a trainable parameter of model_chunks; leave "
            "it out"
        )
    return ids[id(param)]


def _is_expert(name: str, metas: Sequence[ParamMeta], given: Mapping[str, Any]) -> dict[str, bool]:
    kinds = {meta.is_expert for meta in metas}
    if len(kinds) > 1:
        raise ConfigError(f"group {name!r} mixes experts (allreduce=False) and dense parameters; make two groups")
    return {"is_expert_parallel": kinds.pop() if kinds else bool(given.get("is_expert_parallel", False))}


def _check_values(name: str, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        problem = "" if value is None or isinstance(value, Tensor) or key in HELD else value_problem(key, value)
        if problem:
            raise ConfigError(f"param_groups: group {name!r}: {key}={value!r}: {problem}")
    if given.get("lr_mult", 1.0) != 1.0 and given.get("lr") is not None and given.get("max_lr") is None:
        raise ConfigError(
            f"param_groups: group {name!r} has lr={given['lr']!r} and lr_mult={given['lr_mult']!r}, but lr may "
            "or may not include lr_mult; set lr alone, or lr_mult alone to multiply the configuration's lr"
        )


def _completed(given: Mapping[str, Any], config: OptimizerConfig) -> dict[str, Any]:
    """Add the missing entries to `given`. Unset rates are the configuration's, times the group's `lr_mult`."""
    wd_mult, lr_mult = given.get("wd_mult", 1.0), given.get("lr_mult", 1.0)
    rates = (given.get("max_lr"), given.get("lr"), _times(config.lr, lr_mult))
    max_lr = next((rate for rate in rates if rate is not None), None)
    return {
        "wd_mult": wd_mult,
        "lr_mult": lr_mult,
        "is_decoupled_lr": False,
        "default_config": False,
        "optimizer": config.optimizer,
        "min_lr": _times(config.min_lr, lr_mult),
        "weight_decay": _times(given.get("start_wd", config.weight_decay), wd_mult),
        **given,
        "max_lr": max_lr,
        "lr": given["lr"] if given.get("lr") is not None else max_lr,
    }


def _times(value: float | None, factor: float) -> float | None:
    return value if value is None or factor == 1.0 else value * factor
