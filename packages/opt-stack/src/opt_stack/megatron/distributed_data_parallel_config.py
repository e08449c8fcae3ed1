"""Names of `megatron.core.distributed.distributed_data_parallel_config`."""

from opt_config import DistributedDataParallelConfig

__all__ = ["DistributedDataParallelConfig"]
