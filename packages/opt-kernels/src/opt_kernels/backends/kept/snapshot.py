"""Whether tensors have moved or changed layout since the last step, in one call for all of them.

Python reads a gradient of a parameter in 150 ns and an address in 70 ns; compiled code does both in 10 ns. Where there
is none, a few passes in Python and the guards of torch.compile compare the tensors.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from opt_kernels.backends.cpp.snapshot import NUM_SEEN, Tensors, compiled_snapshot
from opt_kernels.backends.kept.layouts import Layouts

PLAIN = {Tensor, nn.Parameter}  # types whose address and layout say where all of their values are
CHANGED, SAME, MOVED = range(3)  # results of `compare` in `snapshot.cpp`; moved: gradients, nothing else
NUM_FIELDS = 4  # of a tensor without dims, there


class Snapshot:
    """Addresses and layouts of plain tensors in one step, for comparison in the next. Keeps no tensor alive.

    `first` are gradients, the only tensors whose addresses may change. With `reads_grads`, `first` are parameters with
    gradients: both are compared, without reading the gradients in Python.
    """

    def __init__(self, first: Sequence[Tensor], others: Sequence[Tensor] = (), *, reads_grads: bool = False) -> None:
        self._num_first, self._num_others, self._reads_grads = len(first), len(others), reads_grads
        tensors = self._tensors(first, others)
        self._addresses = array("Q", map(Tensor.data_ptr, tensors))
        self._descriptions = array("q", bytes(8 * sum(NUM_FIELDS + 2 * tensor.dim() for tensor in tensors)))
        self._seen = array("Q", bytes(8 * NUM_SEEN * len(tensors)))
        self._compiled = compiled_snapshot()
        self._memory: Any = None  # what compiled code knows about the tensors; no copy of it would be valid
        self._layouts = None if self._is_recorded(list(first), list(others)) else Layouts(tensors)
        self._grads_at: tuple[int, ...] | None = None  # not read since they moved
        self.key = self._key_of_grads()
        """Equal to an earlier one if all gradients are at the addresses of that time."""

    @property
    def grads_at(self) -> tuple[int, ...]:
        """The addresses of the gradients: the same object until one has moved."""
        if self._grads_at is None:
            self._grads_at = tuple(self._addresses[: self._num_first])
        return self._grads_at

    def _key_of_grads(self) -> bytes:
        return self._addresses[: self._num_first].tobytes()

    def holds(self, first: list[Tensor], others: list[Tensor]) -> bool:
        """Whether nothing except addresses of gradients has changed. Not to be called again after it returned False."""
        return self.compared(first, others) != CHANGED

    def compared(self, first: list[Tensor], others: list[Tensor]) -> int:
        """What has changed: CHANGED, SAME or MOVED. Updates `key` and `grads_at`. Must not be called again after it
        returned CHANGED."""
        if self._layouts is None and self._compiled is not None:
            found = self._compiled.compare(first, others, self._memory)
        else:
            found = self._compared_in_python(first, others)
        if found == MOVED:
            self.key, self._grads_at = self._key_of_grads(), None
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a Snapshot holds addresses of tensors, so it is not copied or pickled; make another")

    def _is_recorded(self, first: list[Tensor], others: list[Tensor]) -> bool:
        if self._compiled is None:
            return False
        all_tensors = Tensors(
            self._num_first, self._num_others, self._reads_grads, self._compiled.objects,
            self._addresses.buffer_info()[0], *self._descriptions.buffer_info(), self._seen.buffer_info()[0],
        )  # fmt: skip
        self._memory = ctypes.byref(all_tensors)
        return bool(self._compiled.record(first, others, self._memory))

    def _compared_in_python(self, first: list[Tensor], others: list[Tensor]) -> int:
        assert self._layouts is not None
        tensors = self._tensors(first, others)
        is_complete = len(first) == self._num_first and all(tensor is not None for tensor in tensors)
        if not is_complete or not self._layouts.same(tensors):
            return CHANGED
        addresses = array("Q", map(Tensor.data_ptr, tensors))
        if addresses == self._addresses:
            return SAME
        before, self._addresses = self._addresses, addresses
        return MOVED if addresses[len(first) :] == before[len(first) :] else CHANGED

    def _tensors(self, first: Sequence[Tensor], others: Sequence[Tensor]) -> list[Any]:
        """All tensors that are compared, gradients first; None for a missing one."""
        return [*(param.grad for param in first), *first, *others] if self._reads_grads else [*first, *others]


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether all are dense plain tensors. Subclasses such as DTensor store their elements in other tensors."""
    return set(map(type, tensors)) <= PLAIN and all(tensor.layout is torch.strided for tensor in tensors)
