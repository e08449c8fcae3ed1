"""`Device`: streams, events, graphs, pinned memory, and memory that is freed while work on it is queued.

No other module of this package uses streams or events directly. On an accelerator, an operation returns before it has
run. On a CPU it is complete when it returns, so that most methods of `Device` do nothing. The tests have a third
implementation: a CPU that runs its operations later (`integration_tests/testing/fake_accelerator`).
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor


class GraphError(ValueError):
    """The device does not support graphs, or work cannot be captured."""


class Graph:
    """Captured work of one CUDA device, which can be replayed any number of times on the same memory.

    A `torch.cuda.CUDAGraph`, with a memory pool of its own for tensors that the recorded work allocates.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record the operations inside without running them, in place of an earlier capture.

        Inside, the host must not read from the device, upload to it, or wait for events recorded before.
        """
        graph = torch.cuda.CUDAGraph()
        # Restricted to this thread, because NCCL's watchdog thread queries events meanwhile.
        with torch.cuda.device(self._device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
        self._graph = graph

    def replay(self) -> None:
        """Queue the recorded work to the current stream."""
        assert self._graph is not None
        with torch.cuda.device(self._device):
            self._graph.replay()


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Block the host until all work before this point has run."""


class Stream(Protocol):
    """A queue of work that runs in order."""

    def record_event(self) -> Any:
        """An `Event` after everything queued so far."""

    def wait_event(self, event: Any) -> None:
        """Make work that is queued from now on run after the event. The host does not wait."""


class _Done:
    """The only stream and the only event of a CPU, where operations are complete when they return."""

    def record_event(self) -> "_Done":
        return self

    def wait_event(self, event: Any) -> None:
        return None

    def synchronize(self) -> None:
        return None


_DONE = _Done()


class Device:
    """The device of the tensors: the order of its work, and copies to and from the host. This class is a CPU."""

    is_asynchronous = False  # whether operations may return before they have run

    def __init__(self, device: torch.device | str = "cpu"):
        self.torch_device = torch.device(device)

    def current_stream(self) -> Stream:
        """The stream to which operations are queued at present."""
        return _DONE

    def side_stream(self) -> Stream:
        """The one stream for work that must not delay the compute stream."""
        return _DONE

    @contextmanager
    def joining_side_stream(self) -> Iterator[None]:
        """After an error inside, let the current stream wait for the side stream. Otherwise memory that the error frees
        could be reused while queued work of the side stream still needs it."""
        try:
            yield
        except BaseException:
            self.current_stream().wait_event(self.side_stream().record_event())
            raise

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Queue the operations inside to `stream`."""
        return nullcontext()

    def reaches(self, event: Any, *, within: float) -> bool:
        """Wait at most `within` seconds for the event of a stream. Return whether all work before it has run."""
        return True

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Allocate uninitialised pinned host memory: copies to it from the device need not block the host."""
        return torch.empty_like(tensor)

    def upload(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to the device without blocking the host."""
        return tensor

    def host_empty(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Allocate (numel,) uninitialised host memory. Copies between pinned memory and the device need not block."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    def to_host(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to host memory and wait for the copy. On a CPU, return the tensor itself."""
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in device memory rather than host memory. Always true on a CPU."""
        return True

    def on_host(self) -> AbstractContextManager[None]:
        """Declare that operations inside use host memory only, so that they are not queued."""
        return nullcontext()

    def release_(self, tensor: Tensor) -> None:
        """Free the memory of `tensor` and of all its views. The current stream may still have work queued on it.

        Works with every allocator of torch.
        """
        tensor.untyped_storage().resize_(0)

    def reclaim_(self, tensor: Tensor) -> None:
        """Allocate the memory of `tensor` and of its views again, uninitialised."""
        tensor.untyped_storage().resize_(tensor.nbytes)

    @property
    def has_graphs(self) -> bool:
        """Whether work can be captured."""
        return self.torch_device.type == "cuda"

    def graph(self) -> Graph:
        """Return an empty graph. Raises GraphError if the device does not support graphs."""
        if not self.has_graphs:
            raise GraphError(f"graphs on device {str(self.torch_device)!r}: only cuda devices have them; run without")
        return Graph(self.torch_device)


class Accelerator(Device):
    """A device of the type that `torch.accelerator` uses."""

    is_asynchronous = True

    def __init__(self, device: torch.device):
        super().__init__(device)
        self._side: torch.Stream | None = None

    def current_stream(self) -> Stream:
        return torch.accelerator.current_stream(self.torch_device)

    def side_stream(self) -> Stream:
        if self._side is None:
            self._side = torch.Stream(self.torch_device)
        return self._side

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, torch.Stream)
        before = torch.accelerator.current_stream(self.torch_device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def reaches(self, event: Any, *, within: float) -> bool:
        if self._is_capturing():
            return False  # a query would end the capture with an error
        deadline = time.monotonic() + within
        try:
            while not event.query():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
        except RuntimeError:  # the device has failed, or this process was forked from the one that uses it
            return False
        return True

    def pinned_like(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def upload(self, tensor: Tensor) -> Tensor:
        if self._is_capturing():
            raise GraphError(
                f"upload of a host tensor of shape {tuple(tensor.shape)} while a graph is captured: every replay would "
                "copy from memory that has been freed by then; upload it before the capture"
            )
        # torch's pinned-memory allocator does not reuse the source before the copy has run.
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def host_empty(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pinned)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.torch_device.type

    def _is_capturing(self) -> bool:
        return self.torch_device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class HostCopy:
    """An asynchronous copy to the host of the value that a tensor has at this point of the current stream."""

    def __init__(self, tensor: Tensor, device: Device):
        self._event: Event | None = None
        self._copy = tensor
        self._device = device
        if device.is_asynchronous:
            self._copy = device.pinned_like(tensor)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = device.current_stream().record_event()

    def arrives(self, within: float) -> bool:
        """Wait at most `within` seconds for the copy. Return whether it is complete."""
        return self._event is None or self._device.reaches(self._event, within=within)

    def wait(self) -> Tensor:
        """Wait for the copy and return it. On a CPU, return the tensor itself."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._copy


@cache
def device_of(device: torch.device) -> Device:
    """Return the `Device` of a torch device."""
    return Device(device) if device.type in ("cpu", "meta") else Accelerator(device)
