"""Writes to tensors, as autograd counts them.

Kernels write memory that autograd does not watch. Counting their writes makes a backward pass through an older graph
raise, as after a step of torch's optimizers.
"""

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opt_kernels.backends.cpp.snapshot import NUM_SEEN, Counted, compiled_snapshot


class Writes:
    """Counts the writes of the owner to some tensors, and notices those of others. Keeps the tensors alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Tensors made in inference mode, whose writes are not counted, are left out."""
        self.tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = array("I", bytes(4 * len(self.tensors)))
        self._seen = array("Q", bytes(8 * NUM_SEEN * len(self.tensors)))
        self._compiled = compiled_snapshot()
        if self._compiled is not None:
            at, seen = self._versions.buffer_info()[0], self._seen.buffer_info()[0]
            self._counted = ctypes.byref(Counted(len(self.tensors), self._compiled.objects, at, seen))
        self.accept()

    def count(self) -> None:
        """Count one more write of the owner to each, and accept the writes of others until now."""
        count, num_counted = len(self.tensors), 0
        if not count:
            return
        if self._compiled is not None:
            num_counted = self._compiled.count_writes(self.tensors, self._counted)
        if num_counted < count:
            torch.autograd.graph.increment_version(self.tensors[num_counted:])
            self.accept()

    def accept(self) -> None:
        """Take the writes until now for the owner's."""
        self._versions[:] = array("I", self._present())

    def are_all_own(self) -> bool:
        """Whether no other code has written to the tensors."""
        if self._compiled is not None and self._compiled.same_versions(self.tensors, self._counted):
            return True
        return self._present() == self._versions.tolist()

    def of_others(self) -> list[int]:
        """The number of writes of others to each."""
        return [now - before for now, before in zip(self._present(), self._versions, strict=True)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a Writes holds addresses of tensors, so it is not copied or pickled; make another")

    def _present(self) -> list[int]:
        return [tensor._version for tensor in self.tensors]
