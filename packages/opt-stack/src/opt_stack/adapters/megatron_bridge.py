"""Megatron-Bridge: a configuration whose `provide` builds an optimizer of this library."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from megatron.core.optimizer import OptimizerConfig as MegatronConfig
from torch import nn

from opt_config import ConfigError, OptimizerConfig, ParamKey, ParamPredicate, ParamWithNamePredicate, many
from opt_stack.factory import get_optimizer
from opt_stack.optimizer import Optimizer
from opt_stack.planning.design import ModelChunks


@dataclass
class StackOptimizerConfig(MegatronConfig):  # type: ignore[misc]  # Megatron-Core is untyped where types are checked
    """Megatron-Core's `OptimizerConfig` for Megatron-Bridge, whose `setup_optimizer` calls `provide` if there is one.

        cfg.optimizer = StackOptimizerConfig(optimizer="muon", lr=3e-4, min_lr=3e-5, bf16=True)
        cfg.optimizer.use_distributed_optimizer = cfg.ddp.use_distributed_optimizer = False
        cfg.checkpoint.ckpt_format = "torch"

    Written for Megatron-Bridge 0.6.2; tested with its call, and with Megatron-Core's own wrapper, groups and scheduler.
    Every data-parallel rank keeps the whole state.
    """

    stack: dict[str, Any] = field(default_factory=dict)
    """Fields of `opt_stack.OptimizerConfig` that Megatron-Core does not have, or that replace a field above."""

    def to_stack(self) -> OptimizerConfig:
        """Return the same settings as a configuration of this library.

        Raises:
            ConfigError: a field that this library does not have was set; `stack` has an unknown field; or the
                combination is not supported.
        """
        known = {one.name for one in fields(OptimizerConfig)}
        own = [one for one in fields(self) if one.name != "stack"]
        unknown = [one for one in own if one.name not in known and getattr(self, one.name) != _default(one)]
        if unknown:
            name = unknown[0].name
            raise ConfigError(
                f"{name}={getattr(self, name)!r}: opt_stack.OptimizerConfig has no field of this name; leave it out"
            )
        shared = {one.name: getattr(self, one.name) for one in own if one.name in known}
        return OptimizerConfig.from_dict({**shared, **self.stack})

    def provide(
        self,
        model_chunks: nn.Module | ModelChunks,
        config_overrides: Mapping[Any, Any] | None = None,
        use_gloo_process_groups: bool = True,
        pg_collection: Any = None,
    ) -> Optimizer:
        """Build the optimizer of chunks in Megatron-Core's `DistributedDataParallel`. Collective.

        Raises:
            ConfigError (a ValueError), on every rank: as `to_stack` and `get_optimizer`; or the state would be sharded.
        """
        overrides = None if config_overrides is None else {_key(key): of for key, of in config_overrides.items()}
        return get_optimizer(self.to_stack(), model_chunks, overrides, use_gloo_process_groups, pg_collection)


def _default(of: Field[Any]) -> Any:
    return of.default_factory() if of.default_factory is not MISSING else of.default


def _key(key: Any) -> ParamKey:
    """Convert a parameter key of Megatron-Core."""
    predicates = tuple(ParamPredicate(name=one.name, fn=one.fn) for one in many(key.predicate))
    with_name = tuple(ParamWithNamePredicate(name=one.name, fn=one.fn) for one in many(key.with_name_predicate))
    return ParamKey(name=key.name, attr=key.attr, predicate=predicates, with_name_predicate=with_name)
