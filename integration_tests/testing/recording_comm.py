"""A `Comm` that records its collectives in order of issue: kind, bytes, elements."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opt_distributed.comm import Comm


@dataclass(frozen=True, slots=True)
class Call:
    """One collective: its kind, and the size of its larger tensor."""

    kind: str
    num_bytes: int
    numel: int


def recorded(method: str) -> Callable[..., Any]:
    """The method of `inner`, which is appended to `calls`."""

    def call(self: "RecordingComm", *tensors: Tensor, **options: Any) -> Any:
        largest = max(tensors, key=Tensor.numel)
        self.calls.append(Call(method.removesuffix("_"), largest.numel() * largest.element_size(), largest.numel()))
        return getattr(self.inner, method)(*tensors, **options)

    return call


class RecordingComm:
    """Forwards every call to `inner`, and appends it to `calls`."""

    def __init__(self, inner: Comm):
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.calls: list[Call] = []
        self.allocated: list[int] = []  # bytes of each buffer

    all_reduce_, reduce_scatter_, all_gather_ = map(recorded, ("all_reduce_", "reduce_scatter_", "all_gather_"))
    all_to_all_, broadcast_ = map(recorded, ("all_to_all_", "broadcast_"))

    def of(self, kind: str) -> list[Call]:
        """The recorded calls of one kind, in order of issue."""
        return [call for call in self.calls if call.kind == kind]

    def gather_objects(self, value: Any) -> list[Any]:
        self.calls.append(Call("gather_objects", 0, 0))
        return self.inner.gather_objects(value)

    def allocate(self, numel: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated.append(numel * dtype.itemsize)
        return self.inner.allocate(numel, dtype=dtype, device=device)
