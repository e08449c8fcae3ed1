"""Quantised tensors, such as fp8 parameters, which are saved and loaded dequantised.

They are recognised by what the classes of all libraries have in common: a subclass of `Tensor` that overrides
`dequantize` and whose `copy_` quantises. A view of such a tensor is a copy, which may be read-only, so a file cannot be
read directly into it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from opt_checkpoint.state.dtensor import is_dtensor


def is_quantized(tensor: Tensor | None) -> bool:
    """Whether views of `tensor` are dequantised copies."""
    if tensor is None or type(tensor) in (Tensor, torch.nn.Parameter) or is_dtensor(tensor):
        return False
    return type(tensor).dequantize is not Tensor.dequantize


def stand_in(tensor: Tensor) -> Tensor:
    """Dense zeros with the apparent shape and dtype of `tensor`, as a buffer for loading."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
