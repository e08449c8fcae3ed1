"""What exists only on a device: streams, events, graphs, pinned memory, and memory given back while work is queued.

Nothing else in this package names a stream or an event. On an accelerator an operation returns before it has run; on a
CPU it is done when it returns, so that `Host` has nothing to do. `opt_distributed.comm.deferred` is a third
implementation, for tests: a CPU that runs its operations later.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from opt_distributed.comm.graph import CudaGraph, Graph, GraphError, refuse


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Return on the host once everything before that place has run."""
        ...


class Stream(Protocol):
    """A queue of work, which runs in order."""

    def record_event(self) -> Any:
        """An `Event` after everything queued so far."""
        ...

    def wait_event(self, event: Any) -> None:
        """What is queued from now on runs after the event. The host does not wait."""
        ...


class Device(Protocol):
    """Where tensors live, as far as the order of work is concerned."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether an operation may return before it has run."""
        ...

    def current_stream(self) -> Stream:
        """The stream to which operations are queued now."""
        ...

    def side_stream(self) -> Stream:
        """The one stream for work that the compute stream must not wait for."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Operations inside are queued to `stream`."""
        ...

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Uninitialised memory of the host, which the device can write while the host goes on."""
        ...

    def upload(self, tensor: Tensor) -> Tensor:
        """A tensor of the host on the device; the host does not wait."""
        ...

    def host_empty(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """(numel,) uninitialised memory of the host. Copies between pinned memory and the device need not block."""
        ...

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, for which the host waits; on a CPU the tensor itself."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the device's memory and not in the host's; on a CPU the two are one."""
        ...

    def on_host(self) -> AbstractContextManager[None]:
        """Operations inside compute on host memory alone: nothing is queued."""
        ...

    def release_(self, tensor: Tensor) -> None:
        """Give the memory of `tensor` and of all its views back; the current stream may still have work on it."""
        ...

    def take_back_(self, tensor: Tensor) -> None:
        """Give `tensor` and its views memory again, uninitialised."""
        ...

    def graph(self) -> Graph:
        """A graph without work yet. Raises GraphError where the device has none."""
        ...


class HostCopy:
    """A copy of a tensor on its way to the host, as the tensor is at this place of the current stream."""

    def __init__(self, tensor: Tensor, device: Device):
        self._event: Event | None = None
        self._copy = tensor
        if device.is_asynchronous:
            self._copy = device.pinned_like(tensor)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = device.current_stream().record_event()

    def wait(self) -> Tensor:
        """The copy, once it is there; on a CPU the tensor itself."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copy


class _Done:
    """The only stream, and the only event, where operations are done when they return."""

    def record_event(self) -> "_Done":
        return self

    def wait_event(self, event: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None


_DONE = _Done()


class _OwnsMemory:
    """Memory through the storage's own size, which torch's allocators follow."""

    def release_(self, tensor: Tensor) -> None:
        tensor.untyped_storage().resize_(0)

    def take_back_(self, tensor: Tensor) -> None:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


class Host(_OwnsMemory):
    """A CPU."""

    is_asynchronous = False

    def current_stream(self) -> Stream:
        return _DONE

    def side_stream(self) -> Stream:
        return _DONE

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        return nullcontext()

    def pinned_like(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor

    def host_empty(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        return True

    def on_host(self) -> AbstractContextManager[None]:
        return nullcontext()

    def graph(self) -> Graph:
        raise refuse(torch.device("cpu"))


class Accelerator(_OwnsMemory):
    """A device of torch's current accelerator."""

    is_asynchronous = True

    def __init__(self, device: torch.device):
        self._device = device
        self._side: torch.Stream | None = None

    def current_stream(self) -> Stream:
        return torch.accelerator.current_stream(self._device)

    def side_stream(self) -> Stream:
        if self._side is None:
            self._side = torch.Stream(self._device)
        return self._side

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, torch.Stream)
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def pinned_like(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def upload(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise GraphError(
                f"a tensor of the host, of shape {tuple(tensor.shape)}, while a graph is captured: every replay would "
                "copy from memory that is gone by then; upload it before the capture"
            )
        # torch's allocator of pinned memory keeps the copy's source until the copy has run.
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def host_empty(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pinned)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device.type

    def on_host(self) -> AbstractContextManager[None]:
        return nullcontext()

    def graph(self) -> Graph:
        if self._device.type != "cuda":
            raise refuse(self._device)
        return CudaGraph(self._device)


@cache
def device_of(device: torch.device) -> Device:
    """The streams and the memory of a torch device."""
    return Host() if device.type in ("cpu", "meta") else Accelerator(device)
