"""The interface of a GPU that snapshots use: streams, and pinned host memory.

`opt_distributed.comm.device.Device` also implements it, so its test double, which delays work, can test staging.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor


class StagingDevice(Protocol):
    """A device whose operations may return before they have run."""

    def current_stream(self) -> Any:
        """The stream on which operations are currently queued; has `record_event`."""

    def side_stream(self) -> Any:
        """One stream for copies to the host; has `wait_event` and `record_event`."""

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """A context in which operations are queued on a stream."""

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Uninitialised host memory for non-blocking copies, with the shape and dtype of `tensor`."""


class CudaDevice:
    """A CUDA device.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def side_stream(self) -> Any:
        return self._side

    def on(self, stream: Any) -> AbstractContextManager[None]:
        return torch.cuda.stream(stream)

    def pinned_like(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


@cache
def device_of(device: torch.device) -> StagingDevice | None:
    """The streams of a CUDA device; None for a device with synchronous copies to the host."""
    return CudaDevice(device) if device.type == "cuda" else None
