"""Parameter groups: every trainable parameter is in exactly one, and all ranks have the same groups in one order."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import Parameter

from opt_config import ConfigError, OptimizerConfig, ParamKey, did_you_mean, has_attribute, many
from opt_paramgroups.meta import (
    REFERENCE_ATTRIBUTES,
    Metas,
    ParamId,
    ParamMeta,
    Params,
    describe,
    frozen_by_id,
    parameters_by_id,
)
from opt_paramgroups.overrides import (
    ConfigOverrides,
    DefaultEntries,
    Override,
    get_standard_config_overrides,
    is_qk_norm,
    read_overrides,
)

logger = logging.getLogger("opt_paramgroups")


class GroupKey(NamedTuple):
    """Identifies a group: its merged override, and whether its parameters belong to experts."""

    entries: tuple[tuple[str, Hashable], ...] | None  # sorted by name; None: no difference from the configuration
    is_expert: bool


class Seen(NamedTuple):
    """The labels of all keys that match one parameter, and the group that it belongs to."""

    labels: frozenset[str]
    key: GroupKey


class Report(NamedTuple):
    """What one rank sends to the others."""

    error: str = ""  # why the rank failed; empty: it did not
    seen: frozenset[Seen] = frozenset()
    frozen: Mapping[str, str] = {}  # label of a key, and the first frozen parameter that it matches
    qk_norms: frozenset[bool] = frozenset()  # whether norms of queries and keys have weight decay; empty: no such norms


def matches(param: Parameter, param_name: str, param_key: ParamKey) -> bool:
    """Whether `param_key` matches `param`, named `param_name` in its module. Any field of the key may match.

    >>> import torch
    >>> matches(torch.nn.Parameter(torch.empty(3)), "layers.0.bias", ParamKey(name="*.bias"))
    True
    """
    return param_key.matches(param, param_name)


def seen_at(param: Parameter, meta: ParamMeta, overrides: Mapping[ParamKey, Override]) -> Seen:
    """Return the keys of `overrides` that match a parameter, and its group.

    Attributes are read from `meta` if it has them, else from the tensor. `DefaultEntries` apply only to entries that no
    other key sets. Raises `ConfigError` if two keys set different values; it names both keys and the parameter.
    """

    def has(param: Parameter, attr: str) -> bool:
        known = meta.has_attribute(attr)
        return has_attribute(param, attr) if known is None else known

    matching = [key for key in overrides if key.matches(param, meta.id.name, has=has)]
    by_caller = [overrides[key] for key in matching if not isinstance(overrides[key], DefaultEntries)]
    set_by_caller = {entry for override in by_caller for entry in override}
    merged: dict[str, tuple[ParamKey, Hashable]] = {}
    for key in matching:
        for entry, value in overrides[key].items():
            if isinstance(overrides[key], DefaultEntries) and entry in set_by_caller:
                continue
            first, earlier = merged.setdefault(entry, (key, value))
            if earlier is not value and earlier != value:
                raise ConfigError(
                    f"parameter {str(meta.id)!r}: key {first.label!r} sets {entry!r} to {earlier!r}, key "
                    f"{key.label!r} to {value!r}; set it in one of them only, or let them match different parameters"
                )
    entries = tuple((entry, _hashable(entry, value)) for entry, (_, value) in sorted(merged.items()))
    return Seen(frozenset(key.label for key in matching), GroupKey(entries or None, meta.is_expert))


def _hashable(entry: str, value: Any) -> Hashable:
    if isinstance(value, list | tuple):
        return tuple(_hashable(entry, each) for each in value)
    if isinstance(value, Hashable):
        return value
    raise ConfigError(f"config_overrides: {entry} has {value!r}: must be a number, a string or a tuple of these")


def refuse_unmatched(keys: Sequence[ParamKey], params: Params) -> None:
    """Raise `ConfigError` for these keys, which match no parameter, with near misses on this rank."""
    if keys:
        lines = [f"config_overrides[{key.label}]: matches no parameter.{_near_misses(key, params)}" for key in keys]
        raise ConfigError("\n".join([*lines, "Correct or drop the key, or pass allow_unmatched=True."]))


def warn_if_frozen(unmatched: Sequence[ParamKey], frozen: Mapping[str, str]) -> None:
    """Log a warning for every key that matches frozen parameters only: it has no effect."""
    for key in unmatched:
        if name := frozen.get(key.label):
            logger.warning(
                "config_overrides[%s]: matches frozen parameters only, such as %r (requires_grad=False), so it has no "
                "effect; unfreeze them before the optimizer is built, or drop the key",
                key.label, name,
            )  # fmt: skip


def check_qk_norms(config: OptimizerConfig, are_decayed: frozenset[bool]) -> None:
    """Raise `ConfigError` if `apply_wd_to_qk_layernorm` is set, but no norm of queries or keys has weight decay.

    `are_decayed` has, for the norms of queries and keys of all ranks, whether they have weight decay.
    """
    if not config.apply_wd_to_qk_layernorm or True in are_decayed:
        return
    reason = "no trainable parameter on any rank belongs to a norm called q_layernorm, k_layernorm, q_norm or k_norm"
    if are_decayed:
        reason = "the overrides leave all norms of queries and keys without weight decay"
    raise ConfigError(
        f"apply_wd_to_qk_layernorm=True: has no effect: {reason}; leave it at False, or pass an override with wd_mult "
        "for the norms to decay in place of the standard overrides"
    )


def _near_misses(key: ParamKey, params: Params) -> str:
    names = {id.name for id in params}
    patterns = names | {f"*.{name.rpartition('.')[2]}" for name in names if "." in name}
    hints = [did_you_mean(pattern, patterns) for pattern in many(key.name)]
    hints += [did_you_mean(attr, REFERENCE_ATTRIBUTES) for attr in many(key.attr) if attr not in REFERENCE_ATTRIBUTES]
    return "".join(hints)


Gather = Callable[[Any], Sequence[Any]]
"""Takes a picklable value and returns the values of all ranks, in the same order on every rank."""


def alone(value: Any) -> list[Any]:
    """Return the gather of a single process."""
    return [value]


def group_names(seen: frozenset[Seen]) -> dict[GroupKey, str]:
    """Return the name of each group, in the order of the groups: default first, then by name, dense before experts.

    A name consists of keys: "and" joins those that match the same parameter, a comma those of different parameters.
    Raises `ConfigError` if a set of keys leads to two different groups, or if two groups have the same name.
    """

    def joined(labels: frozenset[str]) -> str:
        return " and ".join(f"({label})" if " or " in label and len(labels) > 1 else label for label in sorted(labels))

    parts_by_key: dict[GroupKey, set[str]] = {}
    for labels, key in seen:
        parts_by_key.setdefault(key, set()).add(joined(labels))
    names = {}
    for key, parts in parts_by_key.items():
        name = "default" if key.entries is None else ", ".join(sorted(parts))
        names[key] = f"{name} (experts)" if key.is_expert else name
    counts = Counter((joined(labels), key.is_expert) for labels, key in seen)
    ambiguous = sorted({labels for (labels, _), count in counts.items() if count > 1})
    if ambiguous or len(set(names.values())) < len(names):
        raise ConfigError(
            f"config_overrides: {' and '.join(map(repr, ambiguous or names.values()))}: the same keys make different "
            "groups; give every rank the same overrides, and different predicates different names"
        )
    ordered = sorted(names, key=lambda key: (key.entries is not None, names[key], key.is_expert))
    return {key: names[key] for key in ordered}


ParamGroup = dict[str, Any]
"""A parameter group of torch.optim."""


class GroupsAndBuffers(NamedTuple):
    """Parameter groups, and the buffers of each model chunk that has any, by the number of the chunk."""

    param_groups: list[ParamGroup]
    buffers: dict[int, Any]


def get_param_groups(
    model_chunks: Sequence[nn.Module],
    config: OptimizerConfig,
    config_overrides: ConfigOverrides | None,
    *,
    gather: Gather = alone,
    metas: Metas | None = None,
    allow_unmatched: bool = False,
    model_chunk_offset: int = 0,
    extra_group_keys: Collection[str] | None = (),
) -> list[ParamGroup]:
    """Return parameter groups of a model, for any optimizer that accepts torch's groups.

    Parameters with the same merged override share a group; experts have groups of their own. Default groups come
    first, the others are sorted by name. In addition to its overrides a group has `params` and `param_ids` (in the same
    order), `name`, `optimizer`, the initial `lr` and `weight_decay`, `max_lr`, `min_lr`, `wd_mult`, `lr_mult`,
    `is_decoupled_lr`, `is_expert_parallel` and `default_config`. `name` consists of the matched keys and contains no
    numbers: it is stable while hyper-parameters change, as long as the same keys share a group.

    Args:
        model_chunks: the model, or its virtual pipeline stages.
        config: the configuration common to all parameters.
        config_overrides: for each key a `ParamGroupOverride`, or an `OptimizerConfig` whose differences from `config`
            apply. The overrides of all matching keys are merged. None: the standard overrides; {}: none.
        gather: `all_gather_object` over the ranks that must agree; called once. The default is for a single process.
        metas: roles of the parameters. None: `describe(model_chunks)`.
        allow_unmatched: accept keys of names or attributes that match no parameter on any rank.
        model_chunk_offset: number of the first chunk.
        extra_group_keys: names of further entries that overrides may set, for the caller's own code that reads them.
            None: any name.

    Raises:
        ConfigError: two keys set different values for one parameter, a key matches no parameter, or an override sets an
            unknown entry or a value that is not allowed; or `apply_wd_to_qk_layernorm` has no effect on any rank. An
            error of any rank is raised on all ranks.
    """
    try:
        params = parameters_by_id(model_chunks, model_chunk_offset=model_chunk_offset)
        if metas is None:
            metas = describe(model_chunks, model_chunk_offset=model_chunk_offset)
        if missing := [str(id) for id in params if id not in metas]:
            raise ConfigError(
                f"metas: no entry for parameter {missing[0]!r}; pass describe(model_chunks) of this model"
            )
        chosen = get_standard_config_overrides(config) if config_overrides is None else config_overrides
        overrides = read_overrides(config, chosen, extra_group_keys=extra_group_keys)
        seen = {id: seen_at(param, metas[id], overrides) for id, param in params.items()}
        frozen: dict[str, str] = {}
        for id, param in frozen_by_id(model_chunks, model_chunk_offset=model_chunk_offset).items():
            for key in overrides:
                if key.matches(param, id.name):
                    frozen.setdefault(key.label, str(id))
        qk_norm_overrides = [seen[id].key.entries for id, param in params.items() if is_qk_norm(param, id.name)]
        qk_norms = frozenset(dict(entries or ()).get("wd_mult", 1.0) != 0.0 for entries in qk_norm_overrides)
    except Exception as error:
        gather(Report(str(error) or repr(error)))  # the other ranks wait in this collective
        raise
    reports: Sequence[Report] = gather(Report("", frozenset(seen.values()), frozen, qk_norms))
    for rank, report in enumerate(reports):
        if report.error:
            raise ConfigError(f"rank {rank}: {report.error}")
    seen_anywhere = frozenset[Seen]().union(*(report.seen for report in reports))
    names = group_names(seen_anywhere)
    labels = frozenset[str]().union(*(labels for labels, _ in seen_anywhere))
    frozen = {label: name for report in reversed(reports) for label, name in report.frozen.items()}
    # Keys with a predicate are exempt: a condition may rightly match nothing, a misspelt name may not.
    named = [key for key in overrides if not (key.predicate or key.with_name_predicate)]
    unmatched = [key for key in named if key.label not in labels]
    warn_if_frozen(unmatched, frozen)
    check_qk_norms(config, frozenset[bool]().union(*(report.qk_norms for report in reports)))
    if not allow_unmatched:
        refuse_unmatched([key for key in unmatched if key.label not in frozen], params)
    members: dict[GroupKey, dict[ParamId, nn.Parameter]] = {key: {} for key in names}
    for id, param in params.items():
        members[seen[id].key][id] = param
    return [_group(name, key, members[key], config) for key, name in names.items()]


def get_param_groups_and_buffers(
    model_chunks: Sequence[nn.Module],
    model_chunk_offset: int,
    config: OptimizerConfig,
    config_overrides: ConfigOverrides | None,
    filter_fn: Callable[[ParamGroup], bool],
    buffer_name: str,
    *,
    gather: Gather = alone,
    metas: Metas | None = None,
) -> GroupsAndBuffers:
    """Return the groups that `filter_fn` accepts, and the buffers that each chunk holds in its attribute `buffer_name`.

    Chunks are numbered from `model_chunk_offset`. A chunk without that attribute is left out, and so is a plain module,
    whose `buffers` is a method. Raises `ConfigError` as `get_param_groups` does.
    """
    groups = get_param_groups(
        model_chunks, config, config_overrides, gather=gather, metas=metas, model_chunk_offset=model_chunk_offset
    )
    buffers = {}
    for number, chunk in enumerate(model_chunks, model_chunk_offset):
        buffer = getattr(chunk, buffer_name, None)
        if buffer is not None and not callable(buffer):
            buffers[number] = buffer
    return GroupsAndBuffers([group for group in groups if filter_fn(group)], buffers)


def _group(name: str, key: GroupKey, params: Params, config: OptimizerConfig) -> ParamGroup:
    """One group with all its entries. Raises `ConfigError` if lr_mult is set without a learning rate."""
    override = dict(key.entries or ())
    lr_mult = override.get("lr_mult", 1.0)
    if lr_mult != 1.0 and override.get("max_lr", config.lr) is None:
        raise ConfigError(
            f"config_overrides: group {name!r} has lr_mult={lr_mult!r} but no learning rate; set lr in the "
            "OptimizerConfig, or max_lr in the override"
        )
    rates: ParamGroup = {rate: _times(override[rate], lr_mult) for rate in ("max_lr", "min_lr") if rate in override}
    membership = {
        "params": list(params.values()),
        "param_ids": list(params),
        "name": name,
        "is_expert_parallel": key.is_expert,
        "default_config": key.entries is None,
    }
    return completed_group({**override, **rates, **membership}, config)


def completed_group(given: Mapping[str, Any], config: OptimizerConfig) -> ParamGroup:
    """Return a group with the entries that it lacks. Unset rates are those of `config`, times the group's `lr_mult`."""
    wd_mult = given.get("wd_mult", 1.0)
    lr_mult = given.get("lr_mult", 1.0)
    rates = (given.get("max_lr"), given.get("lr"), _times(config.lr, lr_mult))
    max_lr = next((rate for rate in rates if rate is not None), None)
    if isinstance(max_lr, Tensor):  # which a scheduler fills, if it is that of `lr`
        max_lr = float(max_lr)
    group = {
        "wd_mult": wd_mult,
        "lr_mult": lr_mult,
        "is_decoupled_lr": False,
        "default_config": False,
        "optimizer": config.optimizer,
        "min_lr": _times(config.min_lr, lr_mult),
        "weight_decay": _times(given.get("start_wd", config.weight_decay), wd_mult),
        **given,
        "max_lr": max_lr,
    }
    if group.get("lr") is None:
        group["lr"] = max_lr
    return group


def _times(value: Any, factor: Any) -> Any:
    """`value * factor`. An unset rate stays unset, and factor 1 keeps the exact value and type."""
    return value if value is None or factor == 1.0 else value * factor
