"""Collectives of host tensors, over a group whose backend only transfers device memory."""

from typing import Any

import torch
from torch import Tensor

from opt_distributed.comm.allocate import zeros
from opt_distributed.comm.collectives import DONE, Comm, Op, Pending, Sizes
from opt_distributed.comm.device import Device


class HostComm:
    """A `Comm` for host tensors: copies them to the device and results back. The host waits for every collective."""

    def __init__(self, comm: Comm, device: Device):
        self.comm, self.device = comm, device
        self.rank, self.size = comm.rank, comm.size

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        there = self.device.upload(x)
        self.comm.all_reduce_(there, op=op)
        return self._back(x, there)

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        there = self.device.upload(full)
        part = there.new_empty(shard.numel())
        self.comm.reduce_scatter_(part, there)
        return self._back(shard, part)

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        part = self.device.upload(shard)
        there = part.new_empty(full.numel())
        self.comm.all_gather_(there, part)
        return self._back(full, there)

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        sent = self.device.upload(x)
        received = sent.new_empty(out.numel())
        self.comm.all_to_all_(received, sent, sizes=sizes)
        return self._back(out, received)

    def broadcast_(self, x: Tensor, *, src: int = 0) -> None:
        there = self.device.upload(x)
        self.comm.broadcast_(there, src=src)
        self._back(x, there)

    def gather_objects(self, value: Any) -> list[Any]:
        return self.comm.gather_objects(value)

    def allocate(self, numel: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return zeros(numel, dtype=dtype, device=device)

    def _back(self, x: Tensor, there: Tensor) -> Pending:
        arrived = self.device.to_host(there)
        x.view(-1).copy_(arrived.view(-1))
        return DONE
