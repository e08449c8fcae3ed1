"""Names of `megatron.core.optimizer.optimizer`."""

from typing import NoReturn

from opt_stack.megatron.absent import absent
from opt_stack.megatron.kinds import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MixedPrecisionOptimizer,
)
from opt_stack.optimizer import MegatronOptimizer

__all__ = [
    "ChainedOptimizer",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "MegatronOptimizer",
    "MixedPrecisionOptimizer",
]


def __getattr__(name: str) -> NoReturn:
    absent(name, __name__)
