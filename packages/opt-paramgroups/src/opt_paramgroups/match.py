"""Matching of keys to parameters, and merging of the overrides of all keys that match."""

import logging
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, cast

from torch.nn import Parameter

from opt_config import ConfigError, ParamKey, did_you_mean, has_attribute, many
from opt_paramgroups.meta import REFERENCE_ATTRIBUTES, ParamMeta
from opt_paramgroups.names import ParamId
from opt_paramgroups.overrides import DefaultEntries, Override
from opt_scheduler import combine_param_group_overrides, param_group_override_to_tuple

logger = logging.getLogger("opt_paramgroups")

Entries = tuple[tuple[str, Hashable], ...]
"""A merged override as pairs sorted by name, independent of the order of merging."""


class Match(NamedTuple):
    """The keys that match one parameter, and their merged override."""

    labels: frozenset[str]  # of the keys that match it
    entries: Entries | None  # of all of them; None: no difference from the configuration


def matches(param: Parameter, param_name: str, param_key: ParamKey) -> bool:
    """Whether `param_key` matches `param`, named `param_name` in its module. Any field of the key may match.

    >>> import torch
    >>> matches(torch.nn.Parameter(torch.empty(3)), "layers.0.bias", ParamKey(name="*.bias"))
    True
    """
    return param_key.matches(param, param_name)


def match_all(param: Parameter, meta: ParamMeta, overrides: Mapping[ParamKey, Override]) -> Match:
    """The keys of `overrides` that match a parameter, and their merged override.

    Attributes are read from `meta` if it has them, else from the tensor. `DefaultEntries` apply only to entries that no
    other key sets. Raises `ConfigError` if two keys set different values; it names both keys and the parameter.
    """
    matching = [
        key for key in overrides if key.matches(param, meta.id.name, has=lambda _, attr: _has(param, meta, attr))
    ]
    set_by_caller = {e for key in matching if not isinstance(overrides[key], DefaultEntries) for e in overrides[key]}
    chosen = {
        key: {entry: value for entry, value in overrides[key].items() if entry not in set_by_caller}
        if isinstance(overrides[key], DefaultEntries)
        else overrides[key]
        for key in matching
    }
    try:
        merged = combine_param_group_overrides([cast(Any, override) for override in chosen.values()])
    except ValueError as error:
        raise _contradiction(meta, chosen) from error
    return Match(frozenset(key.label for key in matching), param_group_override_to_tuple(merged) or None)


def _has(param: Parameter, meta: ParamMeta, attr: str) -> bool:
    known = meta.has_attribute(attr)
    return has_attribute(param, attr) if known is None else known


def _contradiction(meta: ParamMeta, overrides: Mapping[ParamKey, Override]) -> ConfigError:
    """The error that names the first two keys that set one entry to different values."""
    first_key: dict[str, ParamKey] = {}
    for key, override in overrides.items():
        for entry, value in override.items():
            first = first_key.setdefault(entry, key)
            if overrides[first][entry] != value:
                return ConfigError(
                    f"parameter {str(meta.id)!r}: key {first.label!r} sets {entry!r} to "
                    f"{overrides[first][entry]!r}, key {key.label!r} to {value!r}; set it in "
                    "one of them only, or let them match different parameters"
                )
    raise AssertionError("combine_param_group_overrides rejected overrides that do not conflict")


def check_all_matched(
    overrides: Mapping[ParamKey, Override], matched: frozenset[str], params: Mapping[ParamId, Parameter]
) -> None:
    """Raise `ConfigError` for keys of names and attributes that match no parameter, with near misses on this rank.

    Keys with a predicate are exempt: a condition may rightly match nothing, a misspelt name may not.
    """
    unmatched = [
        key for key in overrides if key.label not in matched and not (key.predicate or key.with_name_predicate)
    ]
    if unmatched:
        raise ConfigError(
            "\n".join(
                f"config_overrides[{key.label}]: matches no parameter.{_near_misses(key, params)}" for key in unmatched
            )
            + "\nCorrect or drop the key, or pass allow_unmatched=True."
        )


def frozen_matches(overrides: Mapping[ParamKey, Override], frozen: Mapping[ParamId, Parameter]) -> dict[str, str]:
    """The first frozen parameter that each key matches, by the label of the key. Other keys are left out."""
    first: dict[str, str] = {}
    for id, param in frozen.items():
        for key in overrides:
            if key.label not in first and key.matches(param, id.name):
                first[key.label] = str(id)
    return first


def warn_of_frozen(overrides: Mapping[ParamKey, Override], matched: frozenset[str], frozen: Mapping[str, str]) -> None:
    """Log a warning for every key of names and attributes that matches frozen parameters only: it has no effect."""
    for key in overrides:
        name = frozen.get(key.label)
        if name and key.label not in matched and not (key.predicate or key.with_name_predicate):
            logger.warning(
                "config_overrides[%s]: matches frozen parameters only, such as %r (requires_grad=False), so it has no "
                "effect; unfreeze them before the optimizer is built, or drop the key",
                key.label, name,
            )  # fmt: skip


def _near_misses(key: ParamKey, params: Mapping[ParamId, Parameter]) -> str:
    names = {id.name for id in params}
    patterns = names | {f"*.{name.rpartition('.')[2]}" for name in names if "." in name}
    hints = [did_you_mean(pattern, patterns) for pattern in many(key.name)]
    hints += [did_you_mean(attr, REFERENCE_ATTRIBUTES) for attr in many(key.attr) if attr not in REFERENCE_ATTRIBUTES]
    return "".join(hints)
