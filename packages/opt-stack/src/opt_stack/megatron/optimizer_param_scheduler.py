"""Names of `megatron.core.optimizer_param_scheduler`."""

from opt_scheduler import (
    OptimizerParamScheduler,
    ParamGroupOverride,
    combine_param_group_overrides,
    get_canonical_lr_for_logging,
    param_group_override_to_tuple,
)

__all__ = [
    "OptimizerParamScheduler",
    "ParamGroupOverride",
    "combine_param_group_overrides",
    "get_canonical_lr_for_logging",
    "param_group_override_to_tuple",
]
