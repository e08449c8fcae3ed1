"""Chunks in wrappers of Megatron-Core or torch, which have reduced the gradients when `step` is called."""

import logging
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from opt_config import ConfigError, OptimizerConfig, Replicated
from opt_distributed.comm.collectives import Comm, group_of
from opt_paramgroups import ParamId

logger = logging.getLogger("opt_stack")
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


def averaged_by_torch(
    chunks: Sequence[nn.Module], params: Mapping[ParamId, nn.Parameter], replicas: Comm
) -> frozenset[ParamId]:
    """Return the parameters whose gradients torch's wrapper averages over exactly the ranks of `replicas`.

    The step reduces all others: those of wrappers over other ranks, those that a wrapper ignores, and all of a wrapper
    whose parameters were frozen or unfrozen since it was built.
    """
    wrappers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, DistributedDataParallel)]
    averaged = {id(param) for wrapper in wrappers if _is_over(wrapper, replicas) for param in _averaged(wrapper)}
    if averaged:
        logger.info("gradients are averaged by torch's DistributedDataParallel; the step does not reduce them again")
    return frozenset(name for name, param in params.items() if id(param) in averaged)


def _is_over(wrapper: DistributedDataParallel, replicas: Comm) -> bool:
    group = group_of(replicas)
    if group is None:
        return False
    ranks = dist.get_process_group_ranks(group)
    return dist.get_process_group_ranks(wrapper.process_group) == ranks


def _averaged(wrapper: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters that `wrapper` averages: those that required gradients when the model was wrapped.

    The wrapper does not list them, but records their number and bytes. If these are not those of today's trainable
    parameters, some were frozen or unfrozen since. Then none is returned, and the step reduces all, which leaves
    averaged gradients as they are.
    """
    ignored = set(wrapper.parameters_to_ignore)
    trainable = {
        param: None
        for prefix, module in wrapper.module.named_modules()
        for name, param in module.named_parameters(recurse=False)
        if param.requires_grad and f"{prefix}.{name}" not in ignored
    }
    recorded = wrapper._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    num_bytes = sum(param.numel() * param.element_size() for param in trainable)
    if (recorded["num_parameter_tensors"], recorded["total_parameter_size_bytes"]) != (len(trainable), num_bytes):
        logger.info("parameters were frozen or unfrozen since DistributedDataParallel was built; the step reduces all")
        return []
    return list(trainable)
