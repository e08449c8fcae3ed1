"""Device memory of the fake accelerator. It is overwritten if it is freed too early.

Until an operation has run, its results hold NaN (integers: `GARBAGE`). If a tensor is dropped while work on it is
queued, its memory is overwritten in the order of the stream that it was allocated on, as the next owner would do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _pop_mode, _push_mode

from fake_accelerator.queues import Queue, Task

GARBAGE = -3


class ReleasedError(RuntimeError):
    """An operation on memory that was freed."""


def _key(tensor: Tensor) -> int:
    """The address of the `StorageImpl`, which lives as long as any tensor that uses it."""
    return int(tensor.untyped_storage()._cdata)


_ALONE = torch.empty(1)
_OF_QUERY = torch._C._storage_Use_Count(_key(_ALONE)) - 1  # in newer versions of torch, a query counts itself


def _num_references(key: int) -> int:
    """Tensors that share a storage."""
    return int(torch._C._storage_Use_Count(key)) - _OF_QUERY


class Memory:
    """The memory that the queued work of a rank uses, and whether anything else still refers to it."""

    key = staticmethod(_key)

    def __init__(self, compute: Queue):
        self._compute = compute
        self._allocated_on: dict[int, Queue] = {}  # by storage; `compute` for all others
        self._used: dict[int, list[Tensor]] = {}  # by storage: aliases that queued tasks hold
        self._dropped: set[int] = set()  # storages that only queued tasks hold
        self._released: set[int] = set()
        self._on_host: dict[int, Tensor] = {}  # by storage: an alias, so that the address is not reused
        self._num_kept = 0  # number of these after the last clean-up

    def allocated(self, tensor: Tensor, queue: Queue, *, on_host: bool = False) -> None:
        """Register new memory, and forget what was known of its address."""
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
        """Drop aliases of host memory that nothing else refers to, each time that their number has doubled."""
        if len(self._on_host) >= 2 * self._num_kept + 16:
            self._on_host = {key: one for key, one in self._on_host.items() if _num_references(key) > 1}
            self._num_kept = len(self._on_host)

    def use(self, tensor: Tensor) -> Tensor:
        """Return an alias of `tensor`, which a task holds until it has run.

        Raises:
            ReleasedError: the memory was freed.
        """
        key = _key(tensor)
        if key in self._released:
            raise ReleasedError("an operation was queued on memory that was freed")
        alias = tensor.data  # shares memory, but neither the version counter nor the graph
        self._used.setdefault(key, []).append(alias)
        return alias

    def done(self, aliases: Sequence[Tensor]) -> None:
        """Release the aliases of a task that has run."""
        for alias in aliases:
            key = _key(alias)
            held = self._used[key]
            held[:] = [other for other in held if other is not alias]
            if not held:
                del self._used[key]
                self._dropped.discard(key)

    def check_allocated(self, key: int, name: str, num_held: int) -> None:
        """Raise ReleasedError if only a graph, which holds `num_held` references, and queued tasks refer to memory."""
        queued = len(self._used.get(key, ()))
        if key in self._released or _num_references(key) <= num_held + queued:
            raise ReleasedError(f"{name} of a graph uses memory that was freed after the capture")

    def release(self, tensor: Tensor) -> None:
        """Free memory, even if tensors still refer to it."""
        self._overwrite(tensor)
        self._released.add(_key(tensor))

    def overwrite_dropped(self) -> None:
        """Free memory that only queued tasks still refer to. Called for each task, so without `_num_references`."""
        count = torch._C._storage_Use_Count
        dropped = self._dropped
        on_host = self._on_host
        for key, held in list(self._used.items()):  # a finalizer that reads a tensor may run in between
            if key not in dropped and count(key) - _OF_QUERY - (key in on_host) == len(held):
                dropped.add(key)
                self._overwrite(held[0])

    def _overwrite(self, tensor: Tensor) -> None:
        """Queue the overwriting. Its task holds no counted alias; earlier tasks of the queue may."""
        if tensor.is_meta:
            return  # it has no values
        with AtOnce():
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        queue = self._allocated_on.get(_key(tensor), self._compute)
        queue.push(Task("the next owner of released memory", lambda: poison_(whole)))


class AtOnce:
    """Run the operations inside at once, without gradients, instead of queueing them.

    Used around each task, so without torch's `_disable_current_modes`, which takes longer than most tasks do.
    """

    def __enter__(self) -> None:
        self._modes = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
        self._grad_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._grad_enabled)
        for mode in reversed(self._modes):
            _push_mode(mode)


def poison_(tensor: Tensor) -> None:
    """Overwrite a tensor with values that no test expects."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(253 if tensor.dtype is torch.uint8 else GARBAGE)
