"""Where the memory of buffers comes from that collectives read and write.

By default torch allocates it. A `TorchComm(group, allocate=...)` gives buffers memory of another kind: registered NCCL
user buffers (a `torch.cuda.MemPool` over `ncclMemAlloc`), symmetric memory
(`torch.distributed._symmetric_memory.empty`), or a pool of one's own.
"""

from typing import Protocol

import torch
from torch import Tensor


class Allocate(Protocol):
    """Makes the memory of a buffer. Every rank of the group calls it with the same sizes, in the same order."""

    def __call__(self, numel: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(numel,) zeros, contiguous, with a storage of their own."""
        ...


def zeros(numel: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory from torch's own allocator."""
    return torch.zeros(numel, dtype=dtype, device=device)
