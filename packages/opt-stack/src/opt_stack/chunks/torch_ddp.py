"""Chunks in torch's `DistributedDataParallel`, which has averaged the gradients already when `step` is called."""

import logging
from collections.abc import Iterator, Mapping, Sequence

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

    The step reduces all others: those of wrappers over other ranks, and those that a wrapper ignores.
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


def _averaged(wrapper: DistributedDataParallel) -> Iterator[nn.Parameter]:
    ignored = set(wrapper.parameters_to_ignore)
    return (param for name, param in wrapper.module.named_parameters() if name not in ignored)
