"""Megatron-Core's kinds of optimizer, for `isinstance` only: one optimizer is built for all parameters."""

from collections.abc import Callable
from typing import Any

from opt_config import ConfigError, FlatShards, OptimizerConfig, Replicated, WholeParams
from opt_stack.optimizer import MegatronOptimizer

LAYER_WISE = "layer-wise"  # a `full_param_layout` of the wrapper


class _Kind(type):
    """The optimizers whose configuration `matches`. `isinstance` finds them; they are not subclasses."""

    matches: Callable[[OptimizerConfig], bool]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, MegatronOptimizer) and cls.matches(instance.config)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            f"{cls.__name__} is not built directly; call opt_stack.megatron.get_megatron_optimizer(config, "
            "model_chunks), which returns one optimizer for all parameters. For groups of your own, pass all of them "
            "to opt_stack.get_optimizer_based_on_param_groups(config, model_chunks, param_groups)"
        )


def _is_mixed(config: OptimizerConfig) -> bool:
    return config.bf16 or config.fp16


class DistributedOptimizer(metaclass=_Kind):
    """Optimizers with flat shards of the state (`use_distributed_optimizer=True`)."""

    matches = staticmethod(lambda config: isinstance(config.sharding, FlatShards))

    @staticmethod
    def compute_full_param_layout(*args: Any, **kwargs: Any) -> None:
        """Return None: the wrapper plans the layout."""


class LayerWiseDistributedOptimizer(metaclass=_Kind):
    """Optimizers that assign whole matrices to ranks (`use_layer_wise_distributed_optimizer=True`)."""

    matches = staticmethod(lambda config: isinstance(config.sharding, WholeParams))

    @staticmethod
    def compute_full_param_layout(*args: Any, **kwargs: Any) -> str:
        """Return what tells `DistributedDataParallel(full_param_layout=...)` to plan whole matrices."""
        return LAYER_WISE


class MixedPrecisionOptimizer(metaclass=_Kind):
    """Optimizers of bf16 or fp16 parameters, and those with flat shards."""

    matches = staticmethod(lambda config: _is_mixed(config) or isinstance(config.sharding, FlatShards))


class Float16OptimizerWithFloat16Params(metaclass=_Kind):
    """Optimizers of bf16 or fp16 parameters that keep the whole state on every rank."""

    matches = staticmethod(lambda config: _is_mixed(config) and isinstance(config.sharding, Replicated))


class FP32Optimizer(metaclass=_Kind):
    """Optimizers of fp32 parameters that keep the whole state on every rank."""

    matches = staticmethod(lambda config: not _is_mixed(config) and isinstance(config.sharding, Replicated))


class ChainedOptimizer(metaclass=_Kind):
    """Never matches: one optimizer updates dense parameters and experts, with one gradient norm and one verdict."""

    matches = staticmethod(lambda config: False)
