"""Graphs of the fake accelerator: what is queued during a capture is recorded, and queued again by each replay.

A graph holds addresses. So memory that it reads and that was given back since the capture is an error when it is
replayed, where a GPU would compute with what is there by then; memory that the capture made belongs to the graph.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from opt_distributed.comm.deferred.memory import Memory
from opt_distributed.comm.graph import GraphError


class CaptureError(GraphError):
    """The host does during a capture what a graph cannot repeat."""


@dataclass(slots=True)
class Recording:
    """What a capture has seen so far."""

    memory: Memory
    calls: list[Callable[[], object]] = field(default_factory=list)
    made: set[int] = field(default_factory=set)  # storages that belong to the graph
    read: dict[int, str] = field(default_factory=dict)  # other storages, by the first operation on them
    held: list[int] = field(default_factory=list)  # a storage for each tensor that the calls hold

    def add(self, name: str, call: Callable[[], object], tensors: list[Tensor]) -> None:
        """Records one call that works on these tensors, which it holds."""
        self.calls.append(call)
        for tensor in tensors:
            key = self.memory.key(tensor)
            if key not in self.made:
                self.read.setdefault(key, name)
            self.memory.capture(key)
            self.held.append(key)

    def drop(self) -> None:
        """The graph is gone, or records something else."""
        for key in self.held:
            self.memory.uncapture(key)

    def replay(self) -> None:
        """Makes all calls again. Raises ReleasedError where memory that they read was given back."""
        for key, name in self.read.items():
            self.memory.check_captured(key, name)
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
        recording = Recording(self._mode.memory)
        self._mode.recording = recording
        try:
            yield
        finally:
            self._mode.recording = None
        if self._recording is not None:
            self._recording.drop()
        self._recording = recording

    def replay(self) -> None:
        assert self._recording is not None
        self._recording.replay()
