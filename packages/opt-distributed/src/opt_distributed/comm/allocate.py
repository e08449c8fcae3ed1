"""Allocation of the buffers that collectives read and write.

By default torch allocates them. `TorchComm(group, allocate=...)` uses memory of another kind: registered NCCL user
buffers (a `torch.cuda.MemPool` over `ncclMemAlloc`), symmetric memory
(`torch.distributed._symmetric_memory.empty`), or a custom pool.
"""

from typing import Protocol

import torch
from torch import Tensor


class Allocate(Protocol):
    """Allocates a buffer. Every rank of the group calls it with the same sizes, in the same order."""

    def __call__(self, numel: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return (numel,) zeros, contiguous, in a storage of their own."""
        ...


def zeros(numel: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate with torch's own allocator."""
    return torch.zeros(numel, dtype=dtype, device=device)
