"""Memory whose values come later, and that is overwritten when it is dropped too early.

Until an operation has run, its results hold NaN (integers: `GARBAGE`). Where a tensor was dropped while work on it is
queued, its memory is overwritten in the order of the stream that it was allocated on, as its next owner would do it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from opt_distributed.comm.deferred.queues import Queue, Task

GARBAGE = -3


class ReleasedError(RuntimeError):
    """An operation on memory that was given back."""


class Memory:
    """Which memory a rank's queued work uses, and whether anybody else still does."""

    def __init__(self, compute: Queue):
        self._compute = compute
        self._allocated_on: dict[int, Queue] = {}  # by storage; `compute` where nothing is known
        self._used: dict[int, list[Tensor]] = {}  # by storage: aliases that queued tasks hold
        self._dropped: set[int] = set()  # storages that only queued tasks hold
        self._released: set[int] = set()
        self._on_host: dict[int, Tensor] = {}  # by storage: an alias, so that the address is not given to others
        self._num_kept = 0  # of these when they were last looked through
        self._captured: dict[int, int] = {}  # by storage: references that graphs hold

    def allocated(self, tensor: Tensor, queue: Queue, *, on_host: bool = False) -> None:
        """Notes new memory; what was known of its address is gone."""
        key = _key(tensor)
        self._allocated_on[key] = queue
        self._dropped.discard(key)
        self._released.discard(key)
        if on_host:
            self._forget_unused()
            self._on_host[key] = tensor.data

    def is_on_host(self, tensor: Tensor) -> bool:
        return _key(tensor) in self._on_host

    def _forget_unused(self) -> None:
        """Drops the aliases of host memory that nobody else refers to, whenever there are twice as many."""
        if len(self._on_host) >= 2 * self._num_kept + 16:
            self._on_host = {key: one for key, one in self._on_host.items() if _num_references(key) > 1}
            self._num_kept = len(self._on_host)

    def use(self, tensor: Tensor) -> Tensor:
        """An alias for a task to hold until it has run.

        Raises:
            ReleasedError: the memory was given back.
        """
        key = _key(tensor)
        if key in self._released:
            raise ReleasedError("an operation was queued on memory that was given back")
        alias = tensor.data  # shares memory, but neither the version counter nor the graph
        self._used.setdefault(key, []).append(alias)
        return alias

    def done(self, aliases: Sequence[Tensor]) -> None:
        """The task that held these has run."""
        for alias in aliases:
            key = _key(alias)
            held = self._used[key]
            held[:] = [other for other in held if other is not alias]
            if not held:
                del self._used[key]
                self._dropped.discard(key)

    @staticmethod
    def key(tensor: Tensor) -> int:
        """Names the memory of a tensor for as long as it lives."""
        return _key(tensor)

    def capture(self, key: int) -> None:
        """A graph holds a tensor of this memory, which does not keep it from its next owner."""
        self._captured[key] = self._captured.get(key, 0) + 1

    def uncapture(self, key: int) -> None:
        """It no longer does."""
        self._captured[key] -= 1

    def check_captured(self, key: int, name: str) -> None:
        """Raises ReleasedError where nobody but graphs and queued tasks holds memory that a graph reads."""
        queued = len(self._used.get(key, ()))
        if key in self._released or _num_references(key) <= self._captured[key] + queued:
            raise ReleasedError(f"{name} of a graph works on memory that was given back since the capture")

    def release(self, tensor: Tensor) -> None:
        """Gives memory back, whoever still refers to it."""
        self._overwrite(tensor)
        self._released.add(_key(tensor))

    def overwrite_dropped(self) -> None:
        """Gives back memory that nobody but queued tasks refers to any more."""
        for key, held in self._used.items():
            if key not in self._dropped and _num_references(key) - (key in self._on_host) == len(held):
                self._dropped.add(key)
                self._overwrite(held[0])

    def _overwrite(self, tensor: Tensor) -> None:
        """The task holds no counted alias: tasks of the same queue that come before may."""
        if tensor.is_meta:
            return  # it has no values
        with at_once():
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        queue = self._allocated_on.get(_key(tensor), self._compute)
        queue.push(Task("the next owner of released memory", lambda: poison_(whole)))


@contextmanager
def at_once() -> Iterator[None]:
    """Operations inside are not queued."""
    with _disable_current_modes(), torch.no_grad():
        yield


def poison_(tensor: Tensor) -> None:
    """Writes values that no test expects."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(253 if tensor.dtype is torch.uint8 else GARBAGE)


def _key(tensor: Tensor) -> int:
    """The address of the storage's description, which lives as long as any tensor of it."""
    return int(tensor.untyped_storage()._cdata)


def _num_references(key: int) -> int:
    """Tensors that share a storage."""
    return int(torch._C._storage_Use_Count(key)) - 1  # less the question's own
