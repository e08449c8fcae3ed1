"""The memory of tensors: whether it is dense, and whether other code has written it.

A write is seen as another version, another address, or another storage at the same address.

Kernels write memory that autograd does not watch. Counting their writes makes a backward pass through an older graph
raise, as after a step of torch's optimizers. An assignment to `param.data` leaves the version as it was, and may find
memory at the address of the storage that it releases, so the storage is compared as well.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Mark(NamedTuple):
    """The version and the memory of a tensor at one time."""

    version: int  # 0 for a tensor made in inference mode: nothing counts its writes
    address: int  # 0 for a wrapper subclass, such as DTensor, whose elements are in other tensors
    storage: StorageWeakRef | None  # does not keep the memory


class Writes:
    """Counts the writes of the owner to some tensors, and notices those of others."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self._placed = [tensor for tensor in tensors if _has_memory(tensor)]
        self._version: Callable[[Tensor], int] = _VERSION if len(self._counted) == len(self.tensors) else _version
        self._address = Tensor.data_ptr if len(self._placed) == len(self.tensors) else _address
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._storages: list[StorageWeakRef | None] = []
        self._numbers: list[int] = []  # of the storages, in torch
        self.accept()

    def count(self) -> None:
        """Count one more write of the owner to each. A tensor that others have moved is still to be noticed."""
        torch.autograd.graph.increment_version(self._counted)
        self._versions = list(map(self._version, self.tensors))

    def accept(self) -> None:
        """Take the writes until now for the owner's."""
        self._versions = list(map(self._version, self.tensors))
        if not self._storages or not self._are_in_place():
            self._addresses = list(map(self._address, self.tensors))
            self._storages = [_storage(tensor) for tensor in self.tensors]
            self._numbers = [storage.cdata for storage in self._storages if storage is not None]

    def are_all_own(self) -> bool:
        """Whether no other code has written to the tensors or moved them."""
        return list(map(self._version, self.tensors)) == self._versions and self._are_in_place()

    def of_others(self) -> list[Tensor]:
        """The tensors that other code has written or moved."""
        return [tensor for tensor, mark in zip(self.tensors, self.marks, strict=True) if not is_unwritten(tensor, mark)]

    @property
    def marks(self) -> list[Mark]:
        """The accepted marks of the tensors."""
        return list(map(Mark, self._versions, self._addresses, self._storages))

    def _are_in_place(self) -> bool:
        return list(map(self._address, self.tensors)) == self._addresses and not any(map(_IS_RELEASED, self._numbers))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a Writes holds addresses of tensors, so it is not copied or pickled; make another")


def is_unwritten(tensor: Tensor, mark: Mark) -> bool:
    """Whether no other code has written to `tensor` or moved it since `mark`."""
    is_in_place = mark.storage is None or not _IS_RELEASED(mark.storage.cdata)
    return is_in_place and (_version(tensor), _address(tensor)) == mark[:2]


_VERSION: Callable[[Tensor], int] = attrgetter("_version")
_IS_RELEASED = cast(Callable[[int], bool], torch.UntypedStorage._expired)


def _version(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode, or its data
        return 0


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if _has_memory(tensor) else 0


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    return cast(Any, StorageWeakRef)(tensor.untyped_storage()) if _has_memory(tensor) else None


def _has_memory(tensor: Tensor) -> bool:
    return not hasattr(type(tensor), "__tensor_flatten__")


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without holes or overlaps. True for empty tensors."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
