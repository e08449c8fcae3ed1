"""Names of `megatron.core.optimizer.optimizer_config`."""

from opt_config import (
    AdamOptimizerConfig,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    SGDOptimizerConfig,
)

__all__ = [
    "AdamOptimizerConfig",
    "OptimizerConfig",
    "ParamKey",
    "ParamPredicate",
    "ParamWithNamePredicate",
    "SGDOptimizerConfig",
]
