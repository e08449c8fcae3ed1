"""Names of `megatron.core.optimizer.distrib_optimizer`."""

from opt_stack.megatron.kinds import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
