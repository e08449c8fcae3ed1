"""The optimizer configuration of large-model training, checked when it is built."""

from opt_config.choices import (
    MATRIX_RULES,
    MUON_FAMILY,
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
from opt_config.conflicts import AVERAGED
from opt_config.data_parallel_config import DistributedDataParallelConfig
from opt_config.errors import ConfigError, Interval, Problem, UnknownFieldError, changed_fields, did_you_mean
from opt_config.files import Configuration
from opt_config.foreign import FOREIGN_WORDS, foreign_value
from opt_config.optimizer_config import (
    AdamOptimizerConfig,
    OptimizerConfig,
    SGDOptimizerConfig,
    load_config,
)
from opt_config.param_key import ParamKey, ParamPredicate, ParamWithNamePredicate, has_attribute, many

__all__ = [
    "AVERAGED", "FOREIGN_WORDS", "MATRIX_RULES", "MUON_FAMILY", "AdamOptimizerConfig", "ConfigError",
    "Configuration", "ConstantScale", "DistributedDataParallelConfig", "DynamicScale", "FlatShards", "Interval",
    "LossScaling", "NoScale", "OnDevice", "OnHost", "OptimizerConfig", "ParamKey", "ParamPredicate",
    "ParamWithNamePredicate", "Placement", "Precision", "Problem", "Replicated", "SGDOptimizerConfig", "Sharding",
    "UnknownFieldError", "WholeParams", "changed_fields", "did_you_mean", "foreign_value", "has_attribute",
    "load_config", "many", "resolved",
]  # fmt: skip

__version__ = "0.1.0"
