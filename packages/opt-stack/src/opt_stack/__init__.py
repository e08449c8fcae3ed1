"""The optimizer stack for large models: get_optimizer and its plan."""

from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.comm.groups import ProcessGroupCollection, ProcessGroups
from opt_distributed.step.stepper import StepResult
from opt_stack.built_in import RuleEntry
from opt_stack.factory import (
    describe_optimizer,
    get_megatron_optimizer,
    get_optimizer,
    get_optimizer_based_on_param_groups,
    list_optimizers,
)
from opt_stack.optimizer import MegatronOptimizer, Optimizer
from opt_stack.plan import Plan
from opt_stack.registry import Registry
from opt_stack.torch_rule import torch_rule

describe = describe_optimizer

__version__ = "0.1.0"

__all__ = [
    "DistributedDataParallel",
    "MegatronOptimizer",
    "Optimizer",
    "Plan",
    "ProcessGroupCollection",
    "ProcessGroups",
    "Registry",
    "RuleEntry",
    "StepResult",
    "describe",
    "describe_optimizer",
    "get_megatron_optimizer",
    "get_optimizer",
    "get_optimizer_based_on_param_groups",
    "list_optimizers",
    "torch_rule",
]
