"""Names of `megatron.core.distributed.distributed_data_parallel`."""

from opt_stack.megatron.wrapper import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
