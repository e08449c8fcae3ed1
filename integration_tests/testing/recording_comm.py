"""A `Comm` that records its collectives in order of issue: kind, bytes, elements."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opt_distributed.comm import Comm, Op
from opt_distributed.comm.collectives import Pending, Sizes


@dataclass(frozen=True, slots=True)
class Call:
    """One collective: its kind, and the size of its larger tensor."""

    kind: str
    num_bytes: int
    numel: int


class RecordingComm:
    """Forwards every call to `inner`, and appends it to `calls`."""

    def __init__(self, inner: Comm):
        self.inner = inner
        self.calls: list[Call] = []
        self.allocated: list[int] = []  # bytes of each buffer

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def of(self, kind: str) -> list[Call]:
        """The recorded calls of one kind, in order of issue."""
        return [call for call in self.calls if call.kind == kind]

    def _note(self, kind: str, x: Tensor) -> None:
        self.calls.append(Call(kind, x.numel() * x.element_size(), x.numel()))

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        self._note("all_reduce", x)
        return self.inner.all_reduce_(x, op=op, async_op=async_op)

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        self._note("reduce_scatter", full)
        return self.inner.reduce_scatter_(shard, full, async_op=async_op)

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        self._note("all_gather", full)
        return self.inner.all_gather_(full, shard, async_op=async_op)

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        self._note("all_to_all", x if x.numel() >= out.numel() else out)
        return self.inner.all_to_all_(out, x, sizes=sizes, async_op=async_op)

    def broadcast_(self, x: Tensor, *, src: int = 0) -> None:
        self._note("broadcast", x)
        self.inner.broadcast_(x, src=src)

    def gather_objects(self, value: Any) -> list[Any]:
        self.calls.append(Call("gather_objects", 0, 0))
        return self.inner.gather_objects(value)

    def allocate(self, numel: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated.append(numel * dtype.itemsize)
        return self.inner.allocate(numel, dtype=dtype, device=device)
