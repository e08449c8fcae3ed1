"""A snapshot of a state in host memory: pinned for tensors of a GPU, in buffers that the next snapshot reuses.

Training may change everything as soon as `async_save` returns, so the values are copied first. Only what this rank
holds is copied, view by view, never the whole storage of a view.
"""

from __future__ import annotations

import copy
import dataclasses
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from opt_checkpoint.state.factory import ShardedTensorFactory
from opt_checkpoint.state.flat_state import flatten_state
from opt_checkpoint.state.sharded import ShardedObject, ShardedStateDict, ShardedTensor
from opt_checkpoint.state.tensors import is_dtensor
from opt_checkpoint.state.tree import Path, map_leaves


class CudaDevice:
    """What snapshots need of a GPU, whose operations may return before they have run.

    `opt_distributed.comm.device.Device` has the same methods, so its test double, which delays work, can test staging.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Any:
        """The stream on which operations are currently queued."""
        return torch.cuda.current_stream(self._device)

    def side_stream(self) -> Any:
        """A stream for copies to the host."""
        return self._side

    def on(self, stream: Any) -> AbstractContextManager[None]:
        """A context in which operations are queued on a stream."""
        return torch.cuda.stream(stream)

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Uninitialised host memory for non-blocking copies, with the shape and dtype of `tensor`."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


@cache
def device_of(device: torch.device) -> CudaDevice | None:
    """The streams of a CUDA device; None for a device with synchronous copies to the host."""
    return CudaDevice(device) if device.type == "cuda" else None


class Staging:
    """Host memory for snapshots, allocated once and reused.

    The first snapshot allocates, which costs more than its copy; later ones of the same state only copy.
    """

    def __init__(self) -> None:
        self._buffers: dict[Path, Tensor] = {}
        self._sides: dict[torch.device, Any] = {}  # the copy streams

    def snapshot(self, state: ShardedStateDict) -> ShardedStateDict:
        """Return a copy of a state whose tensors are in this memory; valid until the next snapshot.

        Copies from a GPU run on a separate stream, after the work that is on the current stream at the time of the
        call, and have finished when this returns.

        Args:
            state: what `save` takes. Factories are built before copying; plain values are deep-copied.

        Raises:
            CheckpointingException: the state cannot be flattened.
        """
        flat = flatten_state(state)
        used: set[Path] = set()

        def copied(path: Path, tensor: Tensor) -> Tensor:
            used.add(path)
            return self._copy(path, tensor.detach())

        def staged(path: Path, value: Any) -> Any:
            if isinstance(value, ShardedTensorFactory):
                return map_leaves(flat.built[path], lambda inner, piece: staged(path + inner, piece))
            if path in flat.plain and is_dtensor(value):
                return staged(path, flat.tensors[path])
            if isinstance(value, ShardedTensor) and value.data is not None:
                return dataclasses.replace(value, data=copied(path, value.data))
            if path in flat.plain:
                return copied(path, value)
            if isinstance(value, ShardedObject):
                return dataclasses.replace(value, data=copy.deepcopy(value.data))
            return _plain_copy(value)

        snapshot: ShardedStateDict = map_leaves(state, staged)
        for path in self._buffers.keys() - used:
            del self._buffers[path]
        for side in self._sides.values():
            side.record_event().synchronize()
        return snapshot

    @property
    def nbytes(self) -> int:
        """Bytes of host memory in use."""
        return sum(b.numel() * b.element_size() for b in self._buffers.values())

    def _copy(self, path: Path, source: Tensor) -> Tensor:
        device = device_of(source.device)
        target = self._buffers.get(path)
        if target is None or target.shape != source.shape or target.dtype != source.dtype:
            empty = torch.empty(source.shape, dtype=source.dtype) if device is None else device.pinned_like(source)
            target = self._buffers[path] = empty
        if device is None:
            target.copy_(source)
        else:
            self._copy_from(device, source, target)
        return target

    def _copy_from(self, device: CudaDevice, source: Tensor, target: Tensor) -> None:
        """Copy on the side stream. The state keeps the source alive until `snapshot` has waited for the copy."""
        side = self._sides.setdefault(source.device, device.side_stream())
        side.wait_event(device.current_stream().record_event())
        with device.on(side):
            target.copy_(source, non_blocking=True)


def _plain_copy(value: Any) -> Any:
    """A deep copy in which tensors are on the CPU, detached."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: _plain_copy(v) for k, v in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_plain_copy(v) for v in value)
    return copy.deepcopy(value)
