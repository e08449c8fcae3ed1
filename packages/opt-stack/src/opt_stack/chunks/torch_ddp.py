"""Chunks in torch's `DistributedDataParallel`, which has averaged the gradients already when `step` is called."""

import logging
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from opt_distributed.comm.collectives import Comm, group_of
from opt_paramgroups import ParamId

logger = logging.getLogger("opt_stack")


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
