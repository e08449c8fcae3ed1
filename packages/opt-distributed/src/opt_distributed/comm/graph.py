"""Graphs of a device: work that was queued once, and is queued again by one call."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class GraphError(ValueError):
    """A device has no graphs, or work cannot be captured."""


class Graph(Protocol):
    """Work of one device, captured once and replayed any number of times, on the same memory."""

    def capture(self) -> AbstractContextManager[None]:
        """Operations inside are recorded in place of what was, and do not run. The host must read nothing, upload
        nothing, and wait for no event of before."""
        ...

    def replay(self) -> None:
        """Queues all that was recorded to the current stream."""
        ...


class CudaGraph:
    """`torch.cuda.CUDAGraph`, with memory of its own for what the recorded work makes."""

    def __init__(self, device: torch.device):
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        graph = torch.cuda.CUDAGraph()
        # Of this thread only: NCCL's watchdog asks for events meanwhile.
        with torch.cuda.device(self._device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
        self._graph = graph

    def replay(self) -> None:
        assert self._graph is not None
        with torch.cuda.device(self._device):
            self._graph.replay()


def refuse(device: torch.device) -> GraphError:
    """The error of a device that has no graphs."""
    return GraphError(f"graphs on device {str(device)!r}: only cuda devices have them; run without")
