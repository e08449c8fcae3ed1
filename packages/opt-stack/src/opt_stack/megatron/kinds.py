"""Megatron-Core's kinds of optimizer, and its names for layer-wise sharding."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec

from torch import nn

from opt_config import ConfigError, FlatShards, OptimizerConfig, Replicated, WholeParams
from opt_kernels.rules import Needs
from opt_stack.factory import get_optimizer
from opt_stack.optimizer import MegatronOptimizer, Optimizer
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


class _Kind(type):
    """The optimizers with a configuration of this kind (`_HAS`). `isinstance` finds them; they are not subclasses."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, MegatronOptimizer) and _HAS[cls.__name__](instance.config)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            f"{cls.__name__} is not built directly; call opt_stack.megatron.get_megatron_optimizer(config, "
            "model_chunks), which returns one optimizer for all parameters. For groups of your own, pass all of them "
            "to opt_stack.get_optimizer_based_on_param_groups(config, model_chunks, param_groups)"
        )


def _is_mixed(config: OptimizerConfig) -> bool:
    return config.bf16 or config.fp16


_HAS: Mapping[str, Callable[[OptimizerConfig], bool]] = {
    "DistributedOptimizer": lambda config: isinstance(config.sharding, FlatShards),
    "LayerWiseDistributedOptimizer": lambda config: isinstance(config.sharding, WholeParams),
    "MixedPrecisionOptimizer": lambda config: _is_mixed(config) or isinstance(config.sharding, FlatShards),
    "Float16OptimizerWithFloat16Params": lambda config: _is_mixed(config) and isinstance(config.sharding, Replicated),
    "FP32Optimizer": lambda config: not _is_mixed(config) and isinstance(config.sharding, Replicated),
    "ChainedOptimizer": lambda config: False,
}


class DistributedOptimizer(metaclass=_Kind):
    """Optimizers with flat shards of the state (`use_distributed_optimizer=True`)."""


class LayerWiseDistributedOptimizer(metaclass=_Kind):
    """Optimizers that assign whole matrices to ranks (`use_layer_wise_distributed_optimizer=True`)."""


class MixedPrecisionOptimizer(metaclass=_Kind):
    """Optimizers of bf16 or fp16 parameters, and those with flat shards."""


class Float16OptimizerWithFloat16Params(metaclass=_Kind):
    """Optimizers of bf16 or fp16 parameters that keep the whole state on every rank."""


class FP32Optimizer(metaclass=_Kind):
    """Optimizers of fp32 parameters that keep the whole state on every rank."""


class ChainedOptimizer(metaclass=_Kind):
    """Never matches: one optimizer updates dense parameters and experts, with one gradient norm and one verdict."""


def get_megatron_muon_optimizer(
    config: OptimizerConfig,
    model_chunks: list[nn.Module],
    *args: Any,
    layer_wise_distributed_optimizer: bool = False,
    **kwargs: Any,
) -> MegatronOptimizer:
    """Call `get_megatron_optimizer` for a rule of matrices, such as "muon". Megatron-Core deprecated this name.

    Args:
        config, model_chunks, args, kwargs: as for `get_megatron_optimizer`.
        layer_wise_distributed_optimizer: sets `use_layer_wise_distributed_optimizer` of a copy of `config`.

    Raises:
        ConfigError: `config.optimizer` is not a rule of matrices; and as `get_megatron_optimizer`.
    """
    config = layer_wise(config, kwargs.get("rules"))
    rules = kwargs.get("rules") or Registry().with_installed()
    if rules.rule(config.optimizer, config).needs is not Needs.MATRICES:
        raise ConfigError(
            f"optimizer={config.optimizer!r}: get_megatron_muon_optimizer builds rules of matrices, such as 'muon'; "
            "set optimizer='muon', or call get_megatron_optimizer"
        )
    if layer_wise_distributed_optimizer:
        config = replace(config, use_layer_wise_distributed_optimizer=True)
    return get_megatron_optimizer(config, model_chunks, *args, **kwargs)
