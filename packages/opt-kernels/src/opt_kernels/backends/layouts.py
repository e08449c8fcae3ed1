"""Detects whether the dtype, device, shape or strides of a step's tensors changed, in one call for all tensors."""

from collections.abc import Hashable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


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
            sizes, strides = ([list(of) for of in map(read, tensors)] for read in (Tensor.size, Tensor.stride))
            self._guards = _GUARDS(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether each tensor has the layout of its predecessor. May be False if only autograd's flags differ."""
        if len(tensors) != self._count:
            return False
        if self._guards is not None:
            return bool(self._guards.check(*tensors))
        return [_layout(tensor) for tensor in tensors] == self._known


def _layout(tensor: Tensor | None) -> Hashable:
    if tensor is None or tensor.layout is not torch.strided:
        return None
    return (type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.is_neg())
