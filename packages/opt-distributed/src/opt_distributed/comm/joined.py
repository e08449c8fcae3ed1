"""Collectives of many small tensors as one."""

from collections.abc import Iterable

import torch
from torch import Tensor

from opt_distributed.comm.collectives import Comm


def sum_together_(tensors: Iterable[Tensor], comm: Comm, *, scale: float = 1.0) -> None:
    """Replace small contiguous tensors by `scale` times their sums over ranks, in one all-reduce per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        joined = torch.cat([tensor.view(-1) for tensor in same])
        comm.all_reduce_(joined)
        if scale != 1.0:
            joined.mul_(scale)
        start = 0
        for tensor in same:
            tensor.view(-1).copy_(joined[start : start + tensor.numel()])
            start += tensor.numel()
