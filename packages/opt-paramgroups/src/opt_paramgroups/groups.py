"""Parameter groups: every trainable parameter is in exactly one, and all ranks have the same groups in one order."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from opt_config import ConfigError, OptimizerConfig, ParamKey
from opt_paramgroups.align import Gather, GroupKey, Report, Seen, agree, alone
from opt_paramgroups.match import check_all_matched, frozen_matches, match_all, warn_of_frozen
from opt_paramgroups.meta import ParamMeta, describe
from opt_paramgroups.names import ParamId, frozen_by_id, parameters_by_id
from opt_paramgroups.overrides import ConfigOverrides, Override, read_overrides
from opt_paramgroups.presets import get_standard_config_overrides

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
    metas: Mapping[ParamId, ParamMeta] | None = None,
    allow_unmatched: bool = False,
    model_chunk_offset: int = 0,
    extra_group_keys: Collection[str] | None = (),
) -> list[ParamGroup]:
    """Parameter groups of a model, for any optimizer that accepts torch's groups.

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
            unknown entry or a value that is not allowed. An error of any rank is raised on all ranks.
    """
    try:
        params = parameters_by_id(model_chunks, model_chunk_offset=model_chunk_offset)
        known = metas if metas is not None else describe(model_chunks, model_chunk_offset=model_chunk_offset)
        chosen = get_standard_config_overrides(config) if config_overrides is None else config_overrides
        overrides = read_overrides(config, chosen, extra_group_keys=extra_group_keys)
        seen = {id: _seen(param, _known(known, id), overrides) for id, param in params.items()}
        frozen = frozen_matches(overrides, frozen_by_id(model_chunks, model_chunk_offset=model_chunk_offset))
    except Exception as error:
        gather(Report.failed(error))  # the other ranks wait in this collective
        raise
    agreed = agree(Report.of(seen.values(), frozen=frozen), gather)
    warn_of_frozen(overrides, agreed.labels, agreed.frozen)
    if not allow_unmatched:
        check_all_matched(overrides, agreed.labels | agreed.frozen.keys(), params)
    members: dict[GroupKey, dict[ParamId, nn.Parameter]] = {key: {} for key in agreed.names}
    for id, param in params.items():
        members[seen[id].key][id] = param
    return [_group(name, key, members[key], config) for key, name in agreed.names.items()]


def get_param_groups_and_buffers(
    model_chunks: Sequence[nn.Module],
    model_chunk_offset: int,
    config: OptimizerConfig,
    config_overrides: ConfigOverrides | None,
    filter_fn: Callable[[ParamGroup], bool],
    buffer_name: str,
    *,
    gather: Gather = alone,
) -> GroupsAndBuffers:
    """The groups that `filter_fn` accepts, and the buffers that each chunk holds in its attribute `buffer_name`.

    Chunks are numbered from `model_chunk_offset`. A chunk without that attribute is left out, and so is a plain module,
    whose `buffers` is a method. Raises `ConfigError` as `get_param_groups` does.
    """
    groups = get_param_groups(
        model_chunks, config, config_overrides, gather=gather, model_chunk_offset=model_chunk_offset
    )
    attributes = {
        number: getattr(chunk, buffer_name, None) for number, chunk in enumerate(model_chunks, model_chunk_offset)
    }
    buffers = {number: held for number, held in attributes.items() if held is not None and not callable(held)}
    return GroupsAndBuffers([group for group in groups if filter_fn(group)], buffers)


def _known(metas: Mapping[ParamId, ParamMeta], id: ParamId) -> ParamMeta:
    if id not in metas:
        raise ConfigError(f"metas: no entry for parameter {str(id)!r}; pass describe(model_chunks) of the same model")
    return metas[id]


def _seen(param: nn.Parameter, meta: ParamMeta, overrides: Mapping[ParamKey, Override]) -> Seen:
    match = match_all(param, meta, overrides)
    return Seen(match.labels, GroupKey(match.entries, meta.is_expert))


def _group(name: str, key: GroupKey, params: Mapping[ParamId, nn.Parameter], config: OptimizerConfig) -> ParamGroup:
    """One group with all its entries. Raises `ConfigError` if lr_mult is set without a learning rate."""
    override = dict(key.entries or ())
    lr_mult = override.get("lr_mult", 1.0)
    max_lr = _times(override.get("max_lr", config.lr), lr_mult)
    if max_lr is None and lr_mult != 1.0:
        raise ConfigError(
            f"config_overrides: group {name!r} has lr_mult={lr_mult!r} but no learning rate; set lr in the "
            "OptimizerConfig, or max_lr in the override"
        )
    wd_mult = override.get("wd_mult", 1.0)
    return {
        "wd_mult": wd_mult,
        "lr_mult": lr_mult,
        "is_decoupled_lr": False,
        "optimizer": config.optimizer,
        **override,
        "params": list(params.values()),
        "param_ids": list(params),
        "name": name,
        "is_expert_parallel": key.is_expert,
        "default_config": key.entries is None,
        "max_lr": max_lr,
        "min_lr": _times(override.get("min_lr", config.min_lr), lr_mult),
        "lr": max_lr,
        "weight_decay": _times(override.get("start_wd", config.weight_decay), wd_mult),
    }


def _times(value: Any, factor: Any) -> Any:
    # An unset rate stays unset. Factor 1 keeps the exact value and type.
    return value if value is None or factor == 1.0 else value * factor
