"""Overrides of parameter groups: reads and checks them, given as dicts or as whole configurations."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from opt_config import ConfigError, Interval, OptimizerConfig, ParamKey, did_you_mean
from opt_scheduler import ParamGroupOverride

__all__ = ["OVERRIDE_KEYS", "DefaultEntries", "read_overrides", "unknown_entry", "value_problem"]

Override = Mapping[str, Any]
"""Entries of a group, by name: those in `OVERRIDE_KEYS`, and those that the caller declares as `extra_group_keys`."""


class DefaultEntries(dict[str, Any]):
    """An override with lower precedence: its entries apply only if no other override sets them."""


ConfigOverrides = Mapping[ParamKey, ParamGroupOverride | OptimizerConfig | Override]

OVERRIDE_KEYS = (
    *ParamGroupOverride.__optional_keys__,
    *("lr_mult", "is_decoupled_lr", "clip_grad"),
    *("betas", "eps", "momentum"),
)
"""The entries that an override may set. Schedulers, the factory or rules read them."""

TORCH_KEYS = (
    *("amsgrad", "maximize", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"),
    *("dampening", "nesterov", "alpha", "centered", "rho", "lambd", "t0", "lr_decay", "momentum_decay", "etas"),
    *("step_sizes", "ns_coefficients", "ns_steps", "adjust_lr_fn"),
)
"""Further entries that torch.optim's own optimizers read."""

_RESERVED = MappingProxyType(
    {
        "params": "a group's parameters follow from the keys",
        "param_ids": "a group's parameters follow from the keys",
        "name": "a group's name follows from the keys",
        "is_expert_parallel": "it follows from the roles of the parameters, see opt_paramgroups.describe",
        "default_config": "it marks the groups without overrides",
        "lr": "the schedule writes it; set max_lr, min_lr or lr_mult",
        "weight_decay": "the schedule writes it; set wd_mult, or start_wd and end_wd",
        "step": "the optimizer counts steps",
    }
)

_INTERVALS = MappingProxyType(
    {
        **dict.fromkeys(("lr", "max_lr", "min_lr", "lr_mult"), Interval(0)),
        **dict.fromkeys(("weight_decay", "start_wd", "end_wd", "wd_mult"), Interval(0)),
        "eps": Interval(0, low_open=True),
        "momentum": Interval(0, 1),
    }
)


def read_overrides(
    config: OptimizerConfig, config_overrides: Mapping[ParamKey, Any], *, extra_group_keys: Collection[str] | None = ()
) -> dict[ParamKey, Override]:
    """Every override as a checked dict of group entries. The arguments are not modified.

    An `OptimizerConfig` overrides the fields in which it differs from `config`. `extra_group_keys` are allowed in
    addition to `OVERRIDE_KEYS` and `TORCH_KEYS`; None allows every name. Raises `ConfigError` for keys of another
    type, for reserved and unknown entries, and for values that are not allowed.
    """
    known = None if extra_group_keys is None else {*OVERRIDE_KEYS, *TORCH_KEYS, *extra_group_keys}
    read: dict[ParamKey, dict[str, Any]] = {}
    if not isinstance(config_overrides, Mapping):
        raise ConfigError(f"config_overrides={config_overrides!r}: must map ParamKeys to overrides, or be None")
    for key, override in config_overrides.items():
        if not isinstance(key, ParamKey):
            raise ConfigError(
                f"config_overrides: {key!r}: must be a ParamKey; for a pattern of names, ParamKey(name=...)"
            )
        if isinstance(override, OptimizerConfig):
            read[key] = dict(_difference(config, override, key))
        elif isinstance(override, Mapping):
            _check_names(override, key, known)
            kind = DefaultEntries if isinstance(override, DefaultEntries) else dict
            read[key] = kind({entry: value for entry, value in override.items() if value is not None})
        else:
            reason = "must be a ParamGroupOverride (a dict) or an OptimizerConfig"
            raise ConfigError(f"config_overrides[{key.label}]: {override!r}: {reason}")
        _check(read[key], key)
        if read[key].get("optimizer") == "adamw":
            read[key] = type(read[key])({**read[key], "optimizer": _adamw(config, key)})
    return dict(read)


def _adamw(config: OptimizerConfig, key: ParamKey) -> str:
    """The rule that "adamw" stands for. Raises `ConfigError` if the configuration does not decouple weight decay."""
    if not config.decoupled_weight_decay:
        raise ConfigError(
            f"config_overrides[{key.label}]: optimizer='adamw': contradicts decoupled_weight_decay=False of the "
            "configuration; set optimizer='adam', or decoupled_weight_decay=True"
        )
    return "adam"


def _difference(config: OptimizerConfig, override: OptimizerConfig, key: ParamKey) -> Override:
    """The fields in which `override` differs from `config`, as entries of a group. Unset learning rates are ignored."""
    per_key = _entries(override)
    entries: dict[str, Any] = {}
    for field in dataclasses.fields(OptimizerConfig):
        value, common = getattr(override, field.name), getattr(config, field.name)
        if value == common or (field.name in ("lr", "min_lr") and value is None):
            continue
        if field.name not in per_key:
            raise ConfigError(
                f"config_overrides[{key.label}]: {field.name}={value!r} differs from {common!r} in the main "
                f"configuration; an override with {override.optimizer} may change only {', '.join(per_key)}; derive "
                "it from the main configuration by dataclasses.replace(config, ...)"
            )
        entries |= per_key[field.name]
    return entries


def _entries(override: OptimizerConfig) -> dict[str, dict[str, Any]]:
    """The fields that an override may change, with the group entries that each of them sets."""
    common: dict[str, dict[str, Any]] = {
        "lr": {"max_lr": override.lr},
        "min_lr": {"min_lr": override.min_lr},
        "weight_decay": {"start_wd": override.weight_decay, "end_wd": override.weight_decay},
        "optimizer": {"optimizer": override.optimizer},
    }
    match override.optimizer:  # fields have a prefix for each rule, group entries do not
        case "sgd":
            return common | {"sgd_momentum": {"momentum": override.sgd_momentum}}
        case "muon" | "adaptive_muon":
            return common | {"muon_momentum": {"momentum": override.muon_momentum}}
        case "lion":
            betas = {"betas": (override.lion_beta1, override.lion_beta2)}
            return common | {"lion_beta1": betas, "lion_beta2": betas}
        case _:
            betas = {"betas": (override.adam_beta1, override.adam_beta2)}
            return common | {"adam_beta1": betas, "adam_beta2": betas, "adam_eps": {"eps": override.adam_eps}}


def _check_names(override: Override, key: ParamKey, known: Collection[str] | None) -> None:
    for entry, value in override.items():
        if known is not None and entry not in known and entry not in _RESERVED and not isinstance(value, Mapping):
            raise ConfigError(f"config_overrides[{key.label}]: {entry}={value!r}: {unknown_entry(entry)}")


def unknown_entry(entry: str, known: Collection[str] = OVERRIDE_KEYS) -> str:
    """Why an unknown entry of a group is refused, with the closest of the `known` names."""
    return (
        f"unknown entry; nothing reads it. Allowed are {', '.join(sorted(known))}.{did_you_mean(str(entry), known)} "
        f"For an entry that your own code reads, pass extra_group_keys=({entry!r},)"
    )


def _check(override: Override, key: ParamKey) -> None:
    for entry, value in override.items():
        reason = f"may not be set: {_RESERVED[entry]}" if entry in _RESERVED else value_problem(entry, value)
        if reason:
            raise ConfigError(f"config_overrides[{key.label}]: {entry}={value!r}: {reason}")


def value_problem(entry: str, value: object) -> str:
    """Why a group's entry may not have this value; empty if it may."""
    if isinstance(value, Mapping | set | Tensor) or (isinstance(value, float) and math.isnan(value)):
        return (
            "must be a number, a string or a tuple of these: parameters share a group when all their entries are equal"
        )
    if entry in _INTERVALS and value not in _INTERVALS[entry]:
        return _INTERVALS[entry].sentence
    if entry == "betas" and not (isinstance(value, tuple | list) and all(beta in Interval(0, 1) for beta in value)):
        return f"must be a tuple of numbers in {Interval(0, 1)}"
    if entry == "optimizer" and not (isinstance(value, str) and value):
        return "must be the name of a rule"
    return ""
