"""Checks of the memory of parameters."""

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from opt_kernels.dtensor import local
from opt_kernels.quantized.adapters import is_quantized

_STOP = attrgetter("stop")


class _Range(NamedTuple):
    """The addresses of one tensor's bytes."""

    start: int
    stop: int
    at: int  # among the tensors


def overlapping(tensors: Sequence[Tensor], num_params: int) -> tuple[int, int] | None:
    """Return the indices of two tensors that share memory, in its order; None if there are no such two.

    The first `num_params` are parameters, and one of the two is one: the others, such as frozen parameters, may share
    memory with each other. Tensors in fp8 are not compared.
    """
    by_device: dict[torch.device, list[_Range]] = {}
    for index, tensor in enumerate(tensors):
        if is_lazy(tensor) or is_quantized(tensor):
            continue
        shard = local(tensor.detach())
        if shard.layout is not torch.strided or shard.is_meta or not shard.numel():
            continue
        start = shard.data_ptr()
        if start:
            dims = zip(shard.shape, shard.stride(), strict=True)
            last = sum((size - 1) * stride for size, stride in dims)
            stop = start + (last + 1) * shard.element_size()
            by_device.setdefault(shard.device, []).append(_Range(start, stop, index))
    for ranges in by_device.values():
        furthest = furthest_param = _Range(0, 0, -1)
        for span in sorted(ranges):
            is_param = span.at < num_params
            before = furthest if is_param else furthest_param
            if span.start < before.stop:
                return before.at, span.at
            furthest = max(furthest, span, key=_STOP)
            if is_param:
                furthest_param = max(furthest_param, span, key=_STOP)
    return None
