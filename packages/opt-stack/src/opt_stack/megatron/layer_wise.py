"""Megatron-Core's names for layer-wise sharding: `use_distributed_optimizer` with a matrix rule, and `dist_muon`."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import ParamSpec

from opt_config import ConfigError, OptimizerConfig
from opt_kernels.rules.base import Needs
from opt_stack.factory import get_optimizer
from opt_stack.optimizer import Optimizer
from opt_stack.rules.registry import Registry

Arguments = ParamSpec("Arguments")


def layer_wise(config: OptimizerConfig, rules: Registry | None = None) -> OptimizerConfig:
    """Return `config` with layer-wise sharding if it asks for it as Megatron-Core's training script does.

    `use_distributed_optimizer=True` with a rule of matrices, and the name `dist_muon`, deprecated there, both mean
    `use_layer_wise_distributed_optimizer=True`. Any other configuration is returned as it is, invalid ones too:
    `get_optimizer` refuses those on every rank.
    """
    if not isinstance(config, OptimizerConfig):
        return config  # type: ignore[unreachable]  # `get_optimizer` refuses it
    name = config.optimizer.removeprefix("dist_")
    try:
        needs = (rules or Registry().with_installed()).rule(name, OptimizerConfig(optimizer=name)).needs
    except ConfigError:
        return config
    if needs is not Needs.MATRICES or not (config.use_distributed_optimizer or name != config.optimizer):
        return config
    return replace(config, optimizer=name, use_distributed_optimizer=False, use_layer_wise_distributed_optimizer=True)


def _with_layer_wise(build: Callable[Arguments, Optimizer]) -> Callable[Arguments, Optimizer]:
    """Return `build` with `layer_wise` applied to its argument `config`."""

    @wraps(build)
    def built(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Optimizer:
        given = signature(build).bind(*args, **kwargs)
        given.arguments["config"] = layer_wise(given.arguments["config"], given.arguments.get("rules"))
        return build(*given.args, **given.kwargs)

    return built


get_megatron_optimizer = _with_layer_wise(get_optimizer)
"""`opt_stack.get_optimizer`, except that `use_distributed_optimizer=True` with a rule of matrices means layer-wise
sharding, as in Megatron-Core: see `layer_wise`."""
