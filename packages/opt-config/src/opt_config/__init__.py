"""The optimizer configuration of large-model training, checked when it is built."""

from opt_config.choices import (
    Averages,
    ConstantScale,
    DynamicScale,
    FlatShards,
    LossScaling,
    NoScale,
    OnDevice,
    OnHost,
    Placement,
    Precision,
    Replicated,
    Sharding,
    WholeParams,
    resolved,
)
from opt_config.data_parallel_config import DistributedDataParallelConfig
from opt_config.errors import ConfigError, Problem, UnknownFieldError, did_you_mean
from opt_config.files import Configuration
from opt_config.foreign import FOREIGN_WORDS, foreign_value
from opt_config.optimizer_config import (
    AdamOptimizerConfig,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    SGDOptimizerConfig,
    has_attribute,
    load_config,
    many,
)
from opt_config.validate import AVERAGED, Interval

__all__ = [
    "AVERAGED", "FOREIGN_WORDS", "AdamOptimizerConfig", "Averages", "ConfigError", "Configuration", "ConstantScale",
    "DistributedDataParallelConfig", "DynamicScale", "FlatShards", "Interval", "LossScaling", "NoScale", "OnDevice",
    "OnHost", "OptimizerConfig", "ParamKey", "ParamPredicate", "ParamWithNamePredicate", "Placement", "Precision",
    "Problem", "Replicated", "SGDOptimizerConfig", "Sharding", "UnknownFieldError", "WholeParams", "did_you_mean",
    "foreign_value", "has_attribute", "load_config", "many", "resolved",
]  # fmt: skip

__version__ = "0.1.0"
