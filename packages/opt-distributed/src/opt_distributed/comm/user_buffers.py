"""NCCL user buffers: memory from NCCL's own allocator, registered with the groups whose collectives use it.

Collectives on registered memory skip the copy through NCCL's internal buffers, use fewer SMs, and can be reduced by
NVLink and InfiniBand switches.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opt_distributed.comm.collectives import Comm, ProcessGroupError, TorchComm, zeros


class UserBuffers:
    """An `Allocate` whose buffers come from one `torch.cuda.MemPool` of NCCL, for one set of groups and one device.

    Keep it as long as the groups use its buffers.

    Args:
        comms: the groups whose collectives read and write the buffers. At least one.
        device: the CUDA device of the buffers.
        symmetric: register memory at the same offset on every rank (NCCL windows), which needs torch 2.9.

    Raises:
        ProcessGroupError: the device is not a CUDA device; a group is not one of NCCL, or allocates its own buffers; or
            torch has no NCCL allocator.
    """

    def __init__(self, comms: Sequence[Comm], *, device: torch.device, symmetric: bool):
        self._backends = [nccl_backend(comm, device) for comm in comms]
        self._comms = comms
        self._device = device
        self._symmetric = symmetric
        with torch.cuda.device(device):
            self._pool: Any = torch.cuda.MemPool(self._backends[0].mem_allocator)

    def __call__(self, numel: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return (numel,) zeros from the pool."""
        with torch.cuda.use_mem_pool(self._pool, device):
            return torch.zeros(numel, dtype=dtype, device=device)

    def check(self) -> None:
        """Raise ProcessGroupError if memory of the pool was not allocated by NCCL."""
        if any(segment.get("is_expandable") for segment in self._pool.snapshot()):
            raise ProcessGroupError(
                "nccl_ub=True: torch allocated the buffers as expandable segments, which NCCL cannot register; remove "
                "expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF"
            )

    def register(self) -> None:
        """Register all buffers allocated so far with every group. Collective over each of them.

        Raises:
            ProcessGroupError: `symmetric`, and this torch registers memory only locally.
        """
        for comm, backend in zip(self._comms, self._backends, strict=True):
            # The first collective makes the communicator.
            comm.all_reduce_(torch.zeros(1, dtype=torch.float32, device=self._device))
            if not self._symmetric:
                backend.register_mem_pool(self._pool)
                continue
            try:
                backend.register_mem_pool(self._pool, symm=True)
            except TypeError as error:
                raise ProcessGroupError(
                    f"nccl_ub=True: torch {torch.__version__} does not register symmetric memory; set "
                    "disable_symmetric_registration=True, or install torch 2.9 or later"
                ) from error


def nccl_backend(comm: Comm, device: torch.device) -> Any:
    """Return the NCCL backend of a group for a CUDA device. Raises ProcessGroupError; see `UserBuffers`."""
    if not isinstance(comm, TorchComm):
        raise _refusal(f"but collectives of this group use {type(comm).__name__}")
    if device.type != "cuda":
        raise _refusal(f"but parameters are on {device} and this group uses {dist.get_backend(comm.group)}")
    if comm.allocate is not zeros:
        raise _refusal("but TorchComm(group, allocate=...) allocates the buffers of this group already")
    try:
        backend = comm.group._get_backend(device)
    except RuntimeError:
        raise _refusal(f"but this group uses {dist.get_backend(comm.group)}") from None
    if not hasattr(backend, "register_mem_pool"):
        raise _refusal(f"but this group uses {backend.name()}")
    if not hasattr(backend, "mem_allocator"):
        raise ProcessGroupError(
            f"nccl_ub=True: torch {torch.__version__} has no allocator of NCCL memory; set nccl_ub=False, or install "
            "torch 2.7 or later"
        )
    return backend


def _refusal(reason: str) -> ProcessGroupError:
    return ProcessGroupError(
        f"nccl_ub=True registers CUDA memory with process groups of backend 'nccl', {reason}; set nccl_ub=False"
    )
