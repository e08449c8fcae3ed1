"""Recognises fp8 parameters, and returns the objects through which they are updated."""

from collections.abc import Callable

from torch import Tensor

from opt_kernels.quantized.adapters import adapted
from opt_kernels.quantized.protocol import QuantizedParam
from opt_kernels.quantized.tensor import QuantizedTensor

Adapter = Callable[[Tensor], QuantizedParam | None]
"""Returns the `QuantizedParam` of a library's fp8 tensor; None for tensors of other kinds."""

_ADAPTERS: list[Adapter] = [adapted]


def register_adapter(adapter: Adapter) -> None:
    """Register an adapter for the fp8 tensors of another library. The adapter registered last is tried first."""
    _ADAPTERS.insert(0, adapter)


def quantized(tensor: Tensor) -> QuantizedParam | None:
    """The `QuantizedParam` of an fp8 tensor; None for any other tensor.

    Raises:
        QuantizationError: an fp8 tensor in a form that cannot be updated.
    """
    if type(tensor).__module__.startswith("torch.") or type(tensor) is Tensor:
        return None
    if isinstance(tensor, QuantizedTensor):
        return tensor
    return next((found for adapter in _ADAPTERS if (found := adapter(tensor)) is not None), None)


def is_quantized(tensor: Tensor) -> bool:
    """Whether `tensor` is an fp8 tensor."""
    return quantized(tensor) is not None
