"""Names of `megatron.core.optimizer.layer_wise_optimizer`."""

from opt_stack.megatron.kinds import LayerWiseDistributedOptimizer

__all__ = ["LayerWiseDistributedOptimizer"]
