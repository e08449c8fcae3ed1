"""Parameter groups: which of their options no step can work with, and groups as a state_dict has them."""

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from torch import Tensor

from opt_kernels.formulas.numbers import Number
from opt_kernels.optim.state import StateDictError

ParamGroup = dict[str, Any]

# What schedulers, trainers, loggers and `opt_paramgroups` read from groups; none of it tells an optimizer what to do.
_OF_OTHERS = frozenset(
    {
        *("params", "param_names", "param_ids", "name", "group_name", "label", "tag", "description"),
        *("initial_lr", "base_lr", "max_lr", "min_lr", "swa_lr", "lr_mult", "lr_scale", "is_decoupled_lr"),
        *("base_momentum", "max_momentum", "wd_mult", "start_wd", "end_wd"),
        *("optimizer", "default_config", "is_expert_parallel"),
    }
)
_OF_OTHERS_PREFIXES = ("initial_", "swanlab", "wandb", "log_", "_")

# Arguments of torch.optim that choose how a step is computed. Those of these values ask for nothing else than is done.
_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "foreach": (None, False, True),
        "fused": (None, False, True),
        "capturable": (None, False),
        "differentiable": (None, False),
        "amsgrad": (None, False),
        "maximize": (None, False),
    }
)
_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "foreach": "every step updates all tensors together",
        "fused": "every step is fused",
        "capturable": "it holds for all groups; give it to the optimizer",
        "differentiable": "steps are not recorded by autograd; use torch.optim",
        "amsgrad": "use torch.optim's optimizer with amsgrad=True",
        "maximize": "minimize the negative of the objective",
    }
)
_AT_LEAST_ZERO = ("lr", "weight_decay", "eps", "momentum", "scalar_eps")
# Names of these options in other implementations.
_ALIASES: Mapping[str, str] = MappingProxyType({"use_muon": "use_matrix_rule", "wd": "weight_decay"})


def check_flags(flags: Mapping[str, object]) -> None:
    """Raises ValueError for an argument of torch.optim whose value asks for what is not offered."""
    for name, value in flags.items():
        if not any(value is neutral for neutral in _NEUTRAL[name]):
            allowed = " or ".join(map(repr, _NEUTRAL[name]))
            raise ValueError(f"{name}={value!r} is not offered; {allowed} is allowed: {_INSTEAD[name]}")


def check_keys(group: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises ValueError for a key of a new group that neither this optimizer nor a scheduler or trainer reads."""
    check_flags({name: value for name, value in group.items() if name in _NEUTRAL and name not in known})
    for name, value in group.items():
        if name in known or name in _OF_OTHERS or name in _NEUTRAL or name.startswith(_OF_OTHERS_PREFIXES):
            continue
        options = sorted({*known} - {"params"})
        alias = _ALIASES.get(name)
        nearest = [alias] if alias in options else get_close_matches(name, options, n=1, cutoff=0.5)
        meant = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"{name}={value!r} in a parameter group: nothing reads it; allowed are {', '.join(options)}.{meant} A key "
            "of your own may be set after construction: optimizer.param_groups[0][...]"
        )


def numbers_of(defaults: Mapping[str, Any]) -> tuple[Number, ...]:
    """The numbers that every rule restricts, those in `defaults`: rates of at least 0, as many betas in [0, 1)."""
    restricted = (*_AT_LEAST_ZERO, "betas")
    return tuple(
        Number(name, value, low=0.0, below=1.0 if name == "betas" else None)
        for name, value in defaults.items()
        if name in restricted
    )


def check_options(options: Mapping[str, Any]) -> None:
    """Raise NumberError, a ValueError, for a number that no rule can work with."""
    for name in _AT_LEAST_ZERO:
        if name in options:
            Number(name, 0.0, low=0.0).check(options[name])
    if "max_norm" in options:
        Number("max_norm", 1.0, low=0.0, high=math.inf).check(options["max_norm"])


def check_distinct(params: Sequence[Tensor]) -> None:
    """Raise ValueError for a parameter that a group has twice: a fused sweep would update it twice at once."""
    first: dict[Tensor, int] = {}
    for index, param in enumerate(params):
        if first.setdefault(param, index) != index:
            raise ValueError(
                f"parameter {index} of a group, of shape {tuple(param.shape)}, is also parameter {first[param]}; pass "
                "each parameter once"
            )


def check_fixed(group: Mapping[str, Any], defaults: Mapping[str, Any], fixed: Sequence[str]) -> None:
    """Raises ValueError where an option that all groups share is another one in `group`."""
    for name in fixed:
        is_neutral = name in _NEUTRAL and group.get(name) is None
        if name in group and not is_neutral and _plain(group[name]) != _plain(defaults[name]):
            raise ValueError(
                f"{name}={group[name]!r} in a group of an optimizer that was built with {defaults[name]!r}, which "
                f"holds for all of its groups; build it with {name}={group[name]!r}"
            )


def _plain(value: object) -> object:
    """`value` with lists as tuples: what JSON and YAML make of tuples is equal to them."""
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


def loaded_groups(
    groups: Sequence[ParamGroup], saved: Sequence[ParamGroup], defaults: Mapping[str, Any]
) -> list[ParamGroup]:
    """`saved` with the parameters and hooks of `groups`, and `defaults` for what it does not have.

    Raises StateDictError where there are other numbers of groups or parameters, and for options of torch.optim that
    these optimizers do not have.
    """
    sizes, saved_sizes = ([len(group["params"]) for group in of] for of in (groups, saved))
    if sizes != saved_sizes:
        raise StateDictError(
            f"the state_dict has groups of {saved_sizes} parameters where this optimizer has {sizes}; load one "
            "that was saved by an optimizer of the same groups"
        )
    for group in saved:
        for name in {"amsgrad", "maximize"} - defaults.keys():
            if group.get(name):
                raise StateDictError(
                    f"the state_dict was saved with {name}=True, which is not offered; train on without it"
                )
    hooks_of_groups = [{"hooks": group["hooks"]} if "hooks" in group else {} for group in groups]
    names = [{"param_names": group["param_names"]} if "param_names" in group else {} for group in groups]
    return [
        {**defaults, **own, **_without_hooks(copy.deepcopy(of_saved)), **hooks, "params": group["params"]}
        for group, of_saved, own, hooks in zip(groups, saved, names, hooks_of_groups)
    ]


def _without_hooks(group: ParamGroup) -> ParamGroup:
    return {name: value for name, value in group.items() if name != "hooks"}
