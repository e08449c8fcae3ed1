"""Chunks in Megatron-Core's own `DistributedDataParallel`, which has reduced the gradients when `step` is called."""

from collections.abc import Mapping, Sequence

from torch import nn

from opt_config import ConfigError, OptimizerConfig, Replicated
from opt_paramgroups import ParamId

_MODULE = "megatron.core.distributed.distributed_data_parallel"


def is_megatron_wrapper(chunk: nn.Module) -> bool:
    """Return whether a chunk is Megatron-Core's wrapper. Megatron-Core is not imported."""
    return any(cls.__module__ == _MODULE and cls.__name__ == "DistributedDataParallel" for cls in type(chunk).__mro__)


def check_megatron_wrapper(config: OptimizerConfig, chunks: Sequence[nn.Module], index: int) -> None:
    """Raise ConfigError if chunks have different wrappers, or if the wrapper or the optimizer shards state."""
    chunk = chunks[index]
    other = next((at for at, one in enumerate(chunks) if not is_megatron_wrapper(one)), None)
    if other is not None:
        raise ConfigError(
            f"model chunk {index} is in Megatron-Core's DistributedDataParallel and model chunk {other} is a "
            f"{type(chunks[other]).__name__}; wrap all chunks in the same class"
        )
    if chunk.ddp_config.use_distributed_optimizer:  # type: ignore[union-attr]
        raise ConfigError(
            f"model chunk {index} is in Megatron-Core's DistributedDataParallel with use_distributed_optimizer=True, "
            "which leaves each rank a shard of the gradients in its own layout; wrap it with "
            "use_distributed_optimizer=False, or use opt_stack.megatron.DistributedDataParallel, which shards"
        )
    if not isinstance(config.sharding, Replicated):
        raise ConfigError(
            f"use_distributed_optimizer={config.use_distributed_optimizer}, use_layer_wise_distributed_optimizer="
            f"{config.use_layer_wise_distributed_optimizer}: model chunk {index} is in Megatron-Core's "
            "DistributedDataParallel, which reduces all gradients to every rank; set both to False, or use "
            "opt_stack.megatron.DistributedDataParallel"
        )
    if config.optimizer_cuda_graph:
        raise ConfigError(
            f"optimizer_cuda_graph=True: model chunk {index} is in Megatron-Core's DistributedDataParallel, whose "
            "gradients may be bound to other memory; set it to False"
        )


def reduced_by_megatron(chunks: Sequence[nn.Module], params: Mapping[ParamId, nn.Parameter]) -> frozenset[ParamId]:
    """Return the parameters whose gradients Megatron-Core's wrapper reduces: all of its chunk."""
    reduced = {id(param) for chunk in chunks if is_megatron_wrapper(chunk) for param in chunk.parameters()}
    return frozenset(name for name, param in params.items() if id(param) in reduced)
