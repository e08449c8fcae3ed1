"""Tensors that appear in another dtype than they are stored in, as parameters in fp8: saved and loaded dequantised.

They are found by what libraries' classes have in common: a subclass of `Tensor` with a `dequantize` of its own, whose
`copy_` quantises. A view of such a tensor is a copy, which may be read-only: nothing can be read from a file into it.
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
    """Zeros in the shape and dtype that `tensor` appears in, to be loaded into and copied from."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
