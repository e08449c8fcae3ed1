"""Which tensors are fp8 parameters, and through what they are updated."""

from collections.abc import Callable

from torch import Tensor

from opt_kernels.quantized.adapters import adapted
from opt_kernels.quantized.protocol import QuantizedParam
from opt_kernels.quantized.tensor import QuantizedTensor

Adapter = Callable[[Tensor], QuantizedParam | None]
"""Gives what updates a library's fp8 tensor; None for tensors that are not the library's."""

_ADAPTERS: list[Adapter] = [adapted]


def register_adapter(adapter: Adapter) -> None:
    """Lets optimizers update the fp8 tensors of another library. The last one registered is asked first."""
    _ADAPTERS.insert(0, adapter)


def quantized(tensor: Tensor) -> QuantizedParam | None:
    """What updates an fp8 tensor; None for any other tensor.

    Raises:
        QuantizationError: an fp8 tensor in a form that cannot be updated.
    """
    if type(tensor).__module__.startswith("torch.") or type(tensor) is Tensor:
        return None
    if isinstance(tensor, QuantizedTensor):
        return tensor
    return next((found for adapter in _ADAPTERS if (found := adapter(tensor)) is not None), None)


def is_quantized(tensor: Tensor) -> bool:
    """Whether it is an fp8 tensor."""
    return quantized(tensor) is not None
