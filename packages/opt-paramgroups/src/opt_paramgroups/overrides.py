"""Overrides of parameter groups: presets, and the checks of those that a caller gives."""

import dataclasses
import logging
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from opt_config import (
    MUON_FAMILY,
    ConfigError,
    Interval,
    OptimizerConfig,
    ParamKey,
    ParamWithNamePredicate,
    did_you_mean,
)
from opt_paramgroups.layer_depth import depths_by_name
from opt_paramgroups.meta import frozen_by_id, parameters_by_id
from opt_paramgroups.vocabulary import is_vector
from opt_scheduler import ParamGroupOverride

__all__ = [
    "OVERRIDE_KEYS", "ConfigOverrides", "DefaultEntries", "entries_of_rule",
    "read_overrides", "unknown_entry", "value_problem",
]  # fmt: skip

logger = logging.getLogger("opt_paramgroups")

Override = Mapping[str, Any]
"""Entries of a group, by name: those in `OVERRIDE_KEYS`, and those that the caller declares as `extra_group_keys`."""


class DefaultEntries(dict[str, Any]):
    """An override with lower precedence: its entries apply only if no other override sets them."""


Overrides = dict[ParamKey, Override]
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

_RESERVED = {
    "params": "a group's parameters follow from the keys",
    "param_ids": "a group's parameters follow from the keys",
    "name": "a group's name follows from the keys",
    "is_expert_parallel": "it follows from the roles of the parameters, see opt_paramgroups.describe",
    "default_config": "it marks the groups without overrides",
    "lr": "the schedule writes it; set max_lr, min_lr or lr_mult",
    "weight_decay": "the schedule writes it; set wd_mult, or start_wd and end_wd",
    "step": "the optimizer counts steps",
}

_NOT_NEGATIVE = ("lr", "max_lr", "min_lr", "lr_mult", "weight_decay", "start_wd", "end_wd", "wd_mult")
_INTERVALS = {
    **dict.fromkeys(_NOT_NEGATIVE, Interval(0)),
    "eps": Interval(0, low_open=True),
    "momentum": Interval(0, 1),
}


def read_overrides(
    config: OptimizerConfig, config_overrides: Mapping[ParamKey, Any], *, extra_group_keys: Collection[str] | None = ()
) -> Overrides:
    """Return every override as a checked dict of group entries. The arguments are not modified.

    An `OptimizerConfig` overrides the fields in which it differs from `config`. `extra_group_keys` are allowed in
    addition to `OVERRIDE_KEYS` and `TORCH_KEYS`; None allows every name. Raises `ConfigError` for keys of another
    type, for reserved and unknown entries, and for values that are not allowed.
    """
    known = None if extra_group_keys is None else {*OVERRIDE_KEYS, *TORCH_KEYS, *extra_group_keys}
    read: Overrides = {}
    if not isinstance(config_overrides, Mapping):
        raise ConfigError(f"config_overrides={config_overrides!r}: must map ParamKeys to overrides, or be None")
    for key, override in config_overrides.items():
        if not isinstance(key, ParamKey):
            raise ConfigError(
                f"config_overrides: {key!r}: must be a ParamKey; for a pattern of names, ParamKey(name=...)"
            )
        at = f"config_overrides[{key.label}]"
        if isinstance(override, OptimizerConfig):
            entries = dict(_difference(config, override, key))
        elif isinstance(override, Mapping):
            for entry, value in override.items():
                is_known = known is None or entry in known or entry in _RESERVED
                if not is_known and not isinstance(value, Mapping):
                    raise ConfigError(f"{at}: {entry}={value!r}: {unknown_entry(entry)}")
            kind = DefaultEntries if isinstance(override, DefaultEntries) else dict
            entries = kind({entry: value for entry, value in override.items() if value is not None})
        else:
            reason = "must be a ParamGroupOverride (a dict) or an OptimizerConfig"
            raise ConfigError(f"{at}: {override!r}: {reason}")
        for entry, value in entries.items():
            reason = f"may not be set: {_RESERVED[entry]}" if entry in _RESERVED else value_problem(entry, value)
            if reason:
                raise ConfigError(f"{at}: {entry}={value!r}: {reason}")
        if entries.get("optimizer") == "adamw":
            if not config.decoupled_weight_decay:
                raise ConfigError(
                    f"{at}: optimizer='adamw': contradicts decoupled_weight_decay=False of the configuration; set "
                    "optimizer='adam', or decoupled_weight_decay=True"
                )
            entries["optimizer"] = "adam"
        read[key] = entries
    return read


def _difference(config: OptimizerConfig, override: OptimizerConfig, key: ParamKey) -> Override:
    """The fields in which `override` differs from `config`, as entries of a group. Unset learning rates are ignored."""
    allowed = _entries_by_field(override)
    entries: dict[str, Any] = {}
    for field in dataclasses.fields(OptimizerConfig):
        value = getattr(override, field.name)
        common = getattr(config, field.name)
        if value == common or (field.name in ("lr", "min_lr") and value is None):
            continue
        if field.name not in allowed:
            reason = (
                f"differs from {common!r} in the main configuration; an override with {override.optimizer} may change "
                f"only {', '.join(allowed)}; derive it from the main configuration by dataclasses.replace(config, ...)"
            )
            raise ConfigError(f"config_overrides[{key.label}]: {field.name}={value!r} {reason}")
        entries |= allowed[field.name]
    return entries


_MUON_FIELDS = {"momentum": ("muon_momentum",)}
_FIELDS_OF_ENTRIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "adam": {"betas": ("adam_beta1", "adam_beta2"), "eps": ("adam_eps",)},
    "lion": {"betas": ("lion_beta1", "lion_beta2")},
    "sgd": {"momentum": ("sgd_momentum",)},
    "muon": _MUON_FIELDS,
    "adaptive_muon": _MUON_FIELDS,
}
"""By rule: entries of its groups, and the fields that hold them. Fields have a prefix for each rule, entries do not."""


def entries_of_rule(config: OptimizerConfig, rule: str) -> dict[str, Any]:
    """Return the entries of groups that fields of `config` set for a rule, in addition to rates and decay."""
    return {entry: attrgetter(*names)(config) for entry, names in _FIELDS_OF_ENTRIES.get(rule, {}).items()}


def _entries_by_field(override: OptimizerConfig) -> dict[str, dict[str, Any]]:
    """The fields that an override may change, with the group entries that each of them sets."""
    weight_decay = {"start_wd": override.weight_decay, "end_wd": override.weight_decay}
    per_field: dict[str, dict[str, Any]] = {"lr": {"max_lr": override.lr}, "min_lr": {"min_lr": override.min_lr}}
    per_field |= {"weight_decay": weight_decay, "optimizer": {"optimizer": override.optimizer}}
    rule = override.optimizer if override.optimizer in _FIELDS_OF_ENTRIES else "adam"
    for entry, value in entries_of_rule(override, rule).items():
        per_field |= {name: {entry: value} for name in _FIELDS_OF_ENTRIES[rule][entry]}
    return per_field


def unknown_entry(entry: str, known: Collection[str] = OVERRIDE_KEYS) -> str:
    """Why an unknown entry of a group is refused, with the closest of the `known` names."""
    return (
        f"unknown entry; nothing reads it. Allowed are {', '.join(sorted(known))}.{did_you_mean(str(entry), known)} "
        f"For an entry that your own code reads, pass extra_group_keys=({entry!r},)"
    )


def value_problem(entry: str, value: object) -> str:
    """Why a group's entry may not have this value; empty if it may."""
    if isinstance(value, Mapping | set | Tensor) or (isinstance(value, float) and math.isnan(value)):
        return (
            "must be a number, a string or a tuple of these: parameters share a group when all their entries are equal"
        )
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return "no float is as large; pass a smaller number"
    if entry in _INTERVALS and value not in _INTERVALS[entry]:
        return _INTERVALS[entry].sentence
    unit = Interval(0, 1)
    if entry == "betas" and not (isinstance(value, tuple | list) and all(beta in unit for beta in value)):
        return f"must be a tuple of numbers in {unit}"
    if entry == "optimizer" and not (isinstance(value, str) and value):
        return "must be the name of a rule"
    return ""


def get_standard_config_overrides(config: OptimizerConfig, *, by_name: bool = True) -> Overrides:
    """Return the default overrides: no weight decay of biases and vectors, and decoupled learning rates.

    `apply_wd_to_qk_layernorm` keeps the decay of query and key norms. `decoupled_lr` and `decoupled_min_lr` apply to
    the parameters marked `is_embedding_or_output_parameter`.

    `by_name`: stacks of vectors in two or more dims have no decay either: biases of experts, `A_log`, weights of norms
    and parameters marked `_no_weight_decay`. False: Megatron-Core's overrides, which know only 1-D parameters,
    `*.bias`, and norms called `q_layernorm` and `k_layernorm`.
    """
    decayed_norms = None
    if config.apply_wd_to_qk_layernorm:
        decayed_norms = _QK_NORM if by_name else _QK_NORM_OF_MEGATRON

    def is_undecayed(param: Parameter, name: str) -> bool:
        if decayed_norms and decayed_norms.search(name):
            return False
        return is_vector(param, name) if by_name else param.dim() == 1 or name.endswith(".bias")

    label = "bias or vector, no QK norm" if decayed_norms else "bias or vector"
    undecayed = ParamKey(with_name_predicate=ParamWithNamePredicate(label, is_undecayed))
    overrides: Overrides = {undecayed: {"wd_mult": 0.0}}
    if config.decoupled_lr is not None:
        decoupled = {"max_lr": config.decoupled_lr, "is_decoupled_lr": True}
        if config.decoupled_min_lr is not None:
            decoupled["min_lr"] = config.decoupled_min_lr
        overrides[ParamKey(attr="is_embedding_or_output_parameter")] = decoupled
    return overrides


def get_matrix_rule_overrides(
    config: OptimizerConfig, *, scalar_optimizer: str | None = None, by_name: bool = True
) -> Overrides:
    """Return an elementwise rule for what a matrix rule (Muon, SOAP) leaves: embeddings, outputs, non-matrices.

    An override of the caller that sets `optimizer` for such a parameter takes precedence.

    `scalar_optimizer` names the elementwise rule. None: `config.muon_scalar_optimizer` for Muon's family, else Adam.
    Muon's family also leaves parameters marked `use_muon=False`. `by_name`: as for `get_standard_config_overrides`, 2-D
    stacks of vectors are not matrices; False: all 2-D parameters are, as in Megatron-Core.
    """
    honours_mark = config.optimizer in MUON_FAMILY

    def is_left_out(param: Parameter, name: str) -> bool:
        is_marked = honours_mark and not getattr(param, "use_muon", True)
        return is_marked or param.dim() != 2 or (by_name and is_vector(param, name))

    key = ParamKey(
        attr="is_embedding_or_output_parameter",
        with_name_predicate=ParamWithNamePredicate("not for Muon" if honours_mark else "not a matrix", is_left_out),
    )
    default = config.muon_scalar_optimizer if honours_mark else "adam"
    return {key: DefaultEntries(optimizer=scalar_optimizer or default)}


def get_layer_decay_overrides(
    model_chunks: Sequence[nn.Module],
    decay: float,
    *,
    num_layers: int | None = None,
    depth_of: Callable[[str], int | None] | None = None,
) -> Overrides:
    """Return overrides that shrink learning rates towards the input (arXiv 2106.08254).

    A parameter gets `lr_mult = decay ** (num_layers + 1 - depth)`.

    Args:
        model_chunks: the model.
        decay: in (0, 1].
        num_layers: number of layers of the whole model, equal on every rank. None: as found in the names.
        depth_of: maps the name of a parameter to its depth: 0 for embeddings, i + 1 for layer i, None for parameters
            after the layers. None: as found by common names of layers, such as `layers.i.`, `encoder.layer.i.`,
            `blocks.i.`, `resblocks.i.` and `h.i.`. Layers in stages, `stages.s.blocks.i.`, are counted over the stages.

    Logs a warning if `num_layers` is given and the chunks have no layer: they may be a stage without any.

    Raises:
        ConfigError: `decay` is not in (0, 1], `num_layers` is smaller than the depth of a parameter, no layer is found,
            layers are in stages of which these chunks lack the first ones, or chunks number their layers from 0 each.
    """
    if not 0 < decay <= 1:
        raise ConfigError(f"get_layer_decay_overrides: decay={decay!r}: must be in (0, 1]")
    names = [id.name for id in (*parameters_by_id(model_chunks), *frozen_by_id(model_chunks))]
    find = depth_of or depths_by_name(names).get
    depths: dict[str, int] = {}
    for id in parameters_by_id(model_chunks):
        depth = find(id.name)
        if depth and id.name in depths:
            raise ConfigError(
                f"get_layer_decay_overrides: several chunks have a parameter {id.name!r}, whose name does not tell its "
                "depth; mark the parameters of each depth by an attribute, and write overrides with ParamKey(attr=)"
            )
        if depth is not None:
            depths[id.name] = depth
    deepest = max(depths.values(), default=0)
    last = deepest if num_layers is None else num_layers
    if deepest > last:
        raise ConfigError(
            f"get_layer_decay_overrides: num_layers={num_layers!r}: must be at least {deepest}, the depth of a "
            "parameter"
        )
    if deepest == 0 and names:
        found_none = f"get_layer_decay_overrides: no layers are found in {len(names)} names such as {names[-1]!r}"
        if num_layers is None:
            raise ConfigError(f"{found_none}; pass depth_of=, which maps the name of a parameter to its depth")
        logger.warning("%s; unless this is a stage without layers, pass depth_of=", found_none)
    return {
        ParamKey(with_name_predicate=_at_depth(depth, find)): {"lr_mult": decay ** (last + 1 - depth)}
        for depth in range(last + 1)
    }


def _at_depth(depth: int, depth_of: Callable[[str], int | None]) -> ParamWithNamePredicate:
    return ParamWithNamePredicate(name=f"depth {depth}", fn=lambda param, name: depth_of(name) == depth)


_QK_NORM = re.compile(r"(?:^|[._])(?:(?:q|k|qk|query|key)_(?:layer_?|rms_?)?norm|(?:norm|ln)_(?:q|k))s?\.")
_QK_NORM_OF_MEGATRON = re.compile(r"[qk]_layernorm\.")


def is_qk_norm(param: Tensor, name: str) -> bool:
    """Return whether a parameter belongs to a norm of queries or keys, such as `q_layernorm.weight`, `k_norm.bias`."""
    return is_vector(param, name) and bool(_QK_NORM.search(name))
