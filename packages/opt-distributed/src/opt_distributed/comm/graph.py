"""Device graphs: work that is captured once and queued again by one call."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class GraphError(ValueError):
    """The device does not support graphs, or work cannot be captured."""


class Graph(Protocol):
    """Captured work of one device, which can be replayed any number of times on the same memory."""

    def capture(self) -> AbstractContextManager[None]:
        """Record the operations inside without running them, in place of an earlier capture.

        Inside, the host must not read from the device, upload to it, or wait for events recorded before.
        """
        ...

    def replay(self) -> None:
        """Queue the recorded work to the current stream."""
        ...


class CudaGraph:
    """`torch.cuda.CUDAGraph`, with a memory pool of its own for tensors that the recorded work allocates."""

    def __init__(self, device: torch.device):
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        graph = torch.cuda.CUDAGraph()
        # Restricted to this thread, because NCCL's watchdog thread queries events meanwhile.
        with torch.cuda.device(self._device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
        self._graph = graph

    def replay(self) -> None:
        assert self._graph is not None
        with torch.cuda.device(self._device):
            self._graph.replay()


def refuse(device: torch.device) -> GraphError:
    """The error of a device that does not support graphs."""
    return GraphError(f"graphs on device {str(device)!r}: only cuda devices have them; run without")
