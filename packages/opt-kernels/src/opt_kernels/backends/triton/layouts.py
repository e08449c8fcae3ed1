"""Whether tensors are still what they were, but for where they lie: all of a step's in one call."""

from collections.abc import Hashable, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor


def _guards() -> Any:
    """What torch.compile guards its graphs with: one call for any number of tensors, 30 ns each. Private to torch."""
    try:
        return import_module("torch._C._dynamo.guards").TensorGuards
    except (ImportError, AttributeError):
        return None


_GUARDS = _guards()


class Layouts:
    """Dtype, device, sizes and strides of tensors, to be compared with those of others. Holds none of the tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._count = len(tensors)
        self._guards: Any = None
        self._known: list[Hashable] = []  # where torch has no guards
        if _GUARDS is None:
            self._known = [_layout(tensor) for tensor in tensors]
        else:
            # A size that is given is compared; None would be any.
            sizes, strides = ([list(of) for of in map(read, tensors)] for read in (Tensor.size, Tensor.stride))
            self._guards = _GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are laid out as those were, one by one. May say no where only autograd's flags differ."""
        if len(tensors) != self._count:
            return False
        if self._guards is not None:
            return bool(self._guards.check(*tensors))
        return [_layout(tensor) for tensor in tensors] == self._known


def _layout(tensor: Tensor) -> Hashable:
    return (tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_neg())
