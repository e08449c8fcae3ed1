"""Graphs of the fake accelerator: work that is queued during a capture is recorded, and each replay queues it again.

A graph holds addresses. Memory that it reads must not have been freed since the capture: a replay raises an error where
a GPU would compute with the new contents of that memory. Memory allocated during the capture belongs to the graph.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fake_accelerator.memory import Memory
from opt_distributed.comm import GraphError


class CaptureError(GraphError):
    """During a capture, the host does something that a graph cannot repeat."""


@dataclass(slots=True)
class Recording:
    """What a capture has recorded so far."""

    memory: Memory
    calls: list[Callable[[], object]] = field(default_factory=list)
    made: set[int] = field(default_factory=set)  # storages allocated during the capture
    read: dict[int, str] = field(default_factory=dict)  # other storages, with the first operation on them
    held: Counter[int] = field(default_factory=Counter)  # references to each storage, which do not keep it allocated

    def add(self, name: str, call: Callable[[], object], tensors: list[Tensor]) -> None:
        """Record one call, which holds these tensors."""
        self.calls.append(call)
        for key in map(self.memory.key, tensors):
            self.held[key] += 1
            if key not in self.made:
                self.read.setdefault(key, name)

    def replay(self) -> None:
        """Make all calls again. Raises ReleasedError if memory that they read was freed."""
        for key, name in self.read.items():
            self.memory.check_allocated(key, name, self.held[key])
        for call in self.calls:
            call()


class DeferredGraph:
    """A `Graph` of one rank."""

    def __init__(self, mode: Any):
        self._mode = mode
        self._recording: Recording | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        if self._mode.recording is not None:
            raise CaptureError("a capture within a capture")
        recording = self._mode.recording = Recording(self._mode.memory)
        try:
            yield
        finally:
            self._mode.recording = None
        self._recording = recording

    def replay(self) -> None:
        assert self._recording is not None
        self._recording.replay()
