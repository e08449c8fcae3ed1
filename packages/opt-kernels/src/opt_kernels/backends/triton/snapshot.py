"""Detects whether tensors have moved or changed layout since the last step, in a few passes in C over all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from opt_kernels.backends.triton.addresses import Addresses
from opt_kernels.backends.triton.layouts import Layouts
from opt_kernels.backends.triton.places import Places

PLAIN = {Tensor, nn.Parameter}  # types whose address and layout say where all of their values are


class Snapshot:
    """Addresses and layouts of tensors in one step, for comparison in the next."""

    def __init__(self, grads: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        tensors = [*grads, *others]
        self._num_grads = len(grads)
        self._addresses = Addresses(tensors)
        self.grads_at = self._addresses.values[: self._num_grads]  # the only ones that may change
        self._layouts = Layouts(tensors)
        self._places: Places | None = None  # recorded once a second step has found the same addresses

    def hold(self, grads: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        """Whether nothing except the addresses of gradients has changed. Records the new addresses of gradients."""
        tensors = [*grads, *others]
        if self._places is not None and self._places.surely_same(tensors):
            return True
        if not self._layouts.same(tensors):
            return False
        if self._addresses.same(tensors):
            self._places = Places(tensors) if self._places is None else self._places
            return True
        present = Addresses(tensors)
        if present.values[self._num_grads :] != self._addresses.values[self._num_grads :]:
            return False
        self._addresses, self.grads_at = present, present.values[: self._num_grads]
        self._places = None
        return True


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether all are dense plain tensors. Subclasses such as DTensor store their elements in other tensors."""
    return set(map(type, tensors)) <= PLAIN and all(tensor.layout is torch.strided for tensor in tensors)
