"""Writes to tensors, as autograd counts them.

Kernels write memory that autograd does not watch. Counting their writes makes a backward pass through an older graph
raise, as after a step of torch's optimizers.
"""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from opt_kernels.backends.cpp.snapshot import compiled_snapshot


class Writes:
    """Counts the writes of the owner to some tensors, and notices those of others. Keeps the tensors alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Tensors made in inference mode, whose writes are not counted, are left out."""
        self.tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._versions = array("I")
        self.accept()

    def count(self) -> None:
        """Count one more write of the owner to each, and accept the writes of others until now."""
        compiled, count, num_counted = compiled_snapshot(), len(self.tensors), 0
        if compiled is not None:
            at = self._versions.buffer_info()[0]
            num_counted = compiled.count_writes(self.tensors, count, compiled.objects, at)
        if num_counted < count:
            torch.autograd.graph.increment_version(self.tensors[num_counted:])
            self.accept()

    def accept(self) -> None:
        """Take the writes until now for the owner's."""
        self._versions = array("I", self._present())

    def are_all_own(self) -> bool:
        """Whether no other code has written to the tensors."""
        compiled, count = compiled_snapshot(), len(self.tensors)
        at = self._versions.buffer_info()[0]
        if compiled is not None and compiled.same_versions(self.tensors, count, compiled.objects, at):
            return True
        return self._present() == self._versions.tolist()

    def of_others(self) -> list[int]:
        """The number of writes of others to each."""
        return [now - before for now, before in zip(self._present(), self._versions, strict=True)]

    def _present(self) -> list[int]:
        return [tensor._version for tensor in self.tensors]
