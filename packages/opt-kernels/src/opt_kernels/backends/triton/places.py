"""Compares all that locates the values of hundreds of tensors with the last step, in one pass in C++."""

from array import array

from torch import Tensor

from opt_kernels.backends.cpp.snapshot import compiled_snapshot
from opt_kernels.backends.triton.layouts import Layouts

NUM_FIELDS = 5  # of a tensor without dims, in `snapshot.cpp`


class Places:
    """Type, address, device, dtype, shape and strides of contiguous tensors in one step. Keeps no tensor alive.

    The comparison does not see the negative bit of views such as `z.conj().imag`. With several elements these are not
    contiguous, so only tensors of a single element are compared by their `Layouts` too. The private `torch._neg_view`
    could make others, in the memory of the tensor they replace.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._count = len(tensors)
        self._single = [index for index, tensor in enumerate(tensors) if tensor.numel() <= 1]
        self._layouts = Layouts([tensors[index] for index in self._single])
        self._record = array("q", bytes(8 * sum(NUM_FIELDS + 2 * tensor.dim() for tensor in tensors)))
        self._is_recorded = all(map(Tensor.is_contiguous, tensors)) and self._recorded(tensors)

    def _recorded(self, tensors: list[Tensor]) -> bool:
        compiled = compiled_snapshot()
        if compiled is None or compiled.describe is None:
            return False
        address, room = self._record.buffer_info()
        return bool(compiled.record_places(tensors, len(tensors), address, room, compiled.describe))

    def surely_same(self, tensors: list[Tensor]) -> bool:
        """Whether these are as many tensors, about which nothing has changed. False if that is not known."""
        compiled = compiled_snapshot()
        if not self._is_recorded or len(tensors) != self._count or compiled is None or compiled.describe is None:
            return False
        if not compiled.same_places(tensors, len(tensors), self._record.buffer_info()[0], compiled.describe):
            return False
        return not self._single or self._layouts.same([tensors[index] for index in self._single])
