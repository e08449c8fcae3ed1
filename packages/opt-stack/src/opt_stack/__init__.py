"""Optimizers for large models: `get_optimizer`, its plan and its configuration."""

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig, ParamKey, load_config
from opt_distributed import (
    DistributedDataParallel,
    GradientError,
    ProcessGroupCollection,
    ProcessGroupError,
    ProcessGroups,
    ReplicaError,
    StepResult,
    finalize_model_grads,
    run_threads,
    share_launch_order,
)
from opt_scheduler import OptimizerParamScheduler
from opt_stack.diagnosis.recorder import SkippedStepWarning
from opt_stack.diagnosis.tensor_stats import StepStats, TensorStats
from opt_stack.diagnosis.why import why
from opt_stack.factory import get_megatron_optimizer, get_optimizer, get_optimizer_based_on_param_groups
from opt_stack.gradient_release import release_gradients
from opt_stack.optimizer import MegatronOptimizer, Optimizer
from opt_stack.planning.plan import Plan
from opt_stack.qk_clip import QKClip
from opt_stack.rules.built_in import RuleEntry
from opt_stack.rules.registry import Registry, describe_optimizer, list_optimizers
from opt_stack.rules.torch_rule import torch_rule

__version__ = "0.1.0"

__all__ = [
    "ConfigError", "DistributedDataParallel", "DistributedDataParallelConfig", "GradientError", "MegatronOptimizer",
    "Optimizer", "OptimizerConfig", "OptimizerParamScheduler", "ParamKey", "Plan", "ProcessGroupCollection",
    "ProcessGroupError", "ProcessGroups", "QKClip", "Registry", "ReplicaError", "RuleEntry", "SkippedStepWarning",
    "StepResult", "StepStats", "TensorStats", "describe_optimizer", "finalize_model_grads",
    "get_megatron_optimizer", "get_optimizer", "get_optimizer_based_on_param_groups", "list_optimizers", "load_config",
    "release_gradients", "run_threads", "share_launch_order", "torch_rule", "why",
]  # fmt: skip
