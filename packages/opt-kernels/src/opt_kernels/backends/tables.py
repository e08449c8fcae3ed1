"""Tables that sweeps read, on the device of the tensors that they describe: cached by what they depend on.

A table depends only on its key, such as the addresses of tensors. If parameters, states and gradients stay in place, a
step builds and copies nothing.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

_NO_CONTEXT = nullcontext()


@cache  # asked several times in every launch
def is_cuda(device: torch.device) -> bool:
    """Whether `device` is a GPU, with streams and graphs."""
    return device.type == "cuda"


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which launches, and queries of the current stream, use `device`."""
    return torch.cuda.device(device) if is_cuda(device) else _NO_CONTEXT


T = TypeVar("T")
_Place = tuple[int, Hashable]  # stream and key


class ChunkTableError(ValueError):
    """A table would have to be built and copied to the device while a CUDA graph is captured."""


def is_capturing(device: torch.device) -> bool:
    """Whether launches on `device` are being captured in a CUDA graph."""
    if not is_cuda(device):
        return False
    with launching_on(device):
        return torch.cuda.is_current_stream_capturing()


def current_stream(device: torch.device) -> int:
    """The current stream of `device`; 0 on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if is_cuda(device) else 0


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy `host` to `device` without synchronizing. Raises ChunkTableError while a graph is captured."""
    if is_capturing(device):
        raise ChunkTableError(
            "a table would have to be copied to the device while a graph is captured, because a tensor has moved since "
            "the last step, or there was none; run one step before the capture and keep gradients in place "
            "(zero_grad(set_to_none=False), or flat buffers)"
        )
    return host.pin_memory().to(device, non_blocking=True) if is_cuda(device) else host.to(device)


def _guards() -> Any:
    """The tensor guards of torch.compile, private to torch: one call for any number of tensors, 30 ns each."""
    try:
        return import_module("torch._C._dynamo.guards").TensorGuards
    except (ImportError, AttributeError):
        return None


_GUARDS = _guards()


class Layouts:
    """Dtypes, devices, sizes and strides of tensors, for comparison with other tensors. Keeps no tensor alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        self._guards: Any = None
        self._known: list[Hashable] = []  # where torch has no guards
        if _GUARDS is None:
            self._known = [_layout(tensor) for tensor in tensors]
        else:
            # Given sizes are compared; None would match any size.
            sizes = [list(tensor.shape) for tensor in tensors]
            strides = [list(tensor.stride()) for tensor in tensors]
            self._guards = _GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether each tensor has the layout of its predecessor. May be False if only autograd's flags differ."""
        if len(tensors) != self._count:
            return False
        if self._guards is not None:
            return bool(self._guards.check(*tensors))
        return [_layout(tensor) for tensor in tensors] == self._known


def _layout(tensor: Tensor) -> Hashable:
    if tensor.layout is not torch.strided:
        return None
    return (type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_neg())


class _CachedTable(NamedTuple, Generic[T]):
    """A table, and the layouts that it was built for."""

    layouts: Layouts
    table: T


_changing = Lock()
"""Held by the thread that changes a cache. A forked process has a lock of its own."""


def _in_child() -> None:
    global _changing
    _changing = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class DeviceTables(Generic[T]):
    """LRU cache of tables on one device.

    Keeps at most `capacity` tables and at most `room` bytes, as counted by `bytes_of`, but always the last table.

    Each stream has tables of its own: a copy issued on one stream may not have finished when another stream reads it,
    and its memory may be reused while the other stream still reads. A capture, which starts after all streams are
    synchronized, uses the tables of any stream.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        capacity: int = 64,
        room: int = 1 << 28,
        bytes_of: Callable[[T], int] = lambda table: 0,
    ) -> None:
        self._device = device
        self._capacity = capacity
        self._room = room
        self._bytes_of = bytes_of
        self._bytes = 0
        self._entries: OrderedDict[_Place, _CachedTable[T]] = OrderedDict()
        self._last: tuple[_Place | None, _CachedTable[T] | None] = (None, None)
        # A captured graph reads its tables for as long as it can be replayed, which is unknown here: tables that a
        # capture used are never freed.
        self._captured: list[T] = []

    def get(self, key: Hashable, build: Callable[[], T], *, of: Sequence[Tensor] = ()) -> T:
        """The table of `key`, built by `build` if it is missing, or was built for other layouts than those of the
        tensors `of`: other code may have used tensors of another shape at the same addresses."""
        capturing = is_capturing(self._device)
        place = (current_stream(self._device), key)
        last_place, last = self._last  # at once: other threads may replace it while places are compared
        if place == last_place:  # most steps repeat the last one: comparing a thousand addresses, without hashing
            entry = last
        else:
            entry = self._entries.get(place)
            if entry is None and capturing:
                entry = next((other for (_, known), other in [*self._entries.items()] if known == key), None)
        if entry is None or not entry.layouts.same(of):
            made = _CachedTable(Layouts(of), build())
            with _changing:
                entry = self._built(place, made)
        elif entry is not last:
            with _changing:
                if place in self._entries:
                    self._entries.move_to_end(place)
                    self._last = (place, entry)
        if capturing and not any(entry.table is kept for kept in self._captured):
            self._captured.append(entry.table)
        return entry.table

    def _built(self, place: "_Place", entry: "_CachedTable[T]") -> "_CachedTable[T]":
        """Keep a new table, in place of those that were unused longest if there is no room."""
        if place in self._entries:
            self._bytes -= self._bytes_of(self._entries[place].table)
        self._entries[place] = entry
        self._entries.move_to_end(place)
        self._last = (place, entry)
        self._bytes += self._bytes_of(entry.table)
        while len(self._entries) > self._capacity or (len(self._entries) > 1 and self._bytes > self._room):
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= self._bytes_of(oldest.table)
        return entry
