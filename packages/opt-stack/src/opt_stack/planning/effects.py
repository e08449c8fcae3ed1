"""Refuses settings that no parameter can feel, on any rank, and warns of overrides that bring weight decay back."""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from opt_config import ConfigError, OptimizerConfig, ParamKey, Problem
from opt_distributed.comm.collectives import Comm, agreed
from opt_paramgroups import ParamId, ParamMeta, get_standard_config_overrides
from opt_paramgroups.overrides import read_overrides

logger = logging.getLogger("opt_stack")
_NAMES_SHOWN = 4
_DECAY = ("wd_mult", "start_wd", "end_wd")
_KEEP = "{**opt_paramgroups.get_standard_config_overrides(config), **yours}"


def check_effects(
    config: OptimizerConfig,
    chunks: Sequence[nn.Module],
    metas: Mapping[ParamId, ParamMeta],
    trained: Collection[ParamId],
    everyone: Comm,
) -> None:
    """Raise ConfigError, on every rank, for each setting without effect on the parameters of all ranks. Collective.

    A model may mix dtypes and layouts: one parameter that feels the setting is enough.
    """
    dtypes = {param.dtype for chunk in chunks for param in chunk.parameters()} | {meta.dtype for meta in metas.values()}
    are_dtensors = {metas[id].is_dtensor for id in trained}
    for of_rank in everyone.gather_objects((dtypes, are_dtensors)):
        dtypes, are_dtensors = dtypes | of_rank[0], are_dtensors | of_rank[1]
    if problems := list(_problems(config, dtypes, are_dtensors)):
        raise ConfigError.of("OptimizerConfig", problems)


def _problems(config: OptimizerConfig, dtypes: set[torch.dtype], are_dtensors: set[bool]) -> Iterator[Problem]:
    asked = config.precision.params
    # fp16 scales the loss of a model in fp32 as well, under autocast.
    if asked is not torch.float32 and not config.fp16 and dtypes and asked not in dtypes:
        name = "bf16" if config.bf16 else "params_dtype"
        reason = f"has no effect: the model's parameters are {', '.join(sorted(map(str, dtypes)))}; convert the model"
        yield Problem(name, getattr(config, name), f"{reason} to {asked} first, or leave it out (autocast needs none)")
    for name in ("use_distributed_optimizer", "use_layer_wise_distributed_optimizer"):
        if getattr(config, name) and are_dtensors == {True}:
            reason = "has no effect: all trained parameters are DTensors (fully_shard, parallelize_module), and their"
            yield Problem(name, True, f"{reason} state is sharded as they are; leave it at False")


def check_standard_overrides(
    config: OptimizerConfig,
    overrides: Mapping[ParamKey, Any] | None,
    groups: Sequence[Mapping[str, Any]],
    everyone: Comm,
) -> None:
    """Warn, on rank 0, if `overrides` leave out the standard ones and thereby decay biases and vectors. Collective.

    Parameters for which an override sets the decay are the caller's choice, and so is {}: no overrides at all.

    Raises:
        ConfigError: on every rank, `decoupled_lr` is set, which only the standard overrides apply.
    """
    given = agreed(everyone, lambda: _read(config, overrides))
    standard = get_standard_config_overrides(config)
    undecayed = [key for key, override in standard.items() if override.get("wd_mult") == 0.0]
    chosen = [key for key, override in given.items() if not override.keys().isdisjoint(_DECAY)]
    decayed = [
        str(id)
        for group in groups
        if given and any(group.get(name) for name in ("weight_decay", "end_wd"))
        for id, param in zip(group["param_ids"], group["params"], strict=True)
        if any(key.matches(param, id.name) for key in undecayed)
        and not any(key.matches(param, id.name) for key in chosen)
    ]
    per_rank = everyone.gather_objects(decayed[: _NAMES_SHOWN + 1])
    names = list(dict.fromkeys(name for of_rank in per_rank for name in of_rank))
    if names and everyone.rank == 0:
        shown = ", ".join(map(repr, names[:_NAMES_SHOWN])) + ", ..." * (len(names) > _NAMES_SHOWN)
        logger.warning(
            "config_overrides replace the standard ones, so biases and vectors have weight decay now: %s. To keep them "
            "without decay, pass %s; to decay them on purpose, give them an override with wd_mult=1.0",
            shown, _KEEP,
        )  # fmt: skip


def _read(config: OptimizerConfig, overrides: Mapping[ParamKey, Any] | None) -> Mapping[ParamKey, Mapping[str, Any]]:
    """The overrides as entries of groups. Raises ConfigError if they leave out those that apply `decoupled_lr`."""
    if overrides is None:
        return {}
    given = read_overrides(config, overrides, extra_group_keys=None)
    if config.decoupled_lr is not None and not any("is_decoupled_lr" in override for override in given.values()):
        raise ConfigError(
            f"decoupled_lr={config.decoupled_lr!r} has no effect: config_overrides replace the standard overrides, "
            f"which apply it; pass {_KEEP}, or leave it at None"
        )
    return given
