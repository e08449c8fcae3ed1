"""Values stored as codes: decoding, and encoding again without loss after they were saved as fp32."""

import torch
from torch import Tensor

from opt_kernels.backends import in_memory_order
from opt_kernels.codecs import StateCodec


def values_of(codec: StateCodec, codes: Tensor, scales: Tensor) -> Tensor:
    """Decode `codes`, of dense memory, to a new fp32 tensor of their shape and strides: blocks are runs of memory."""
    values = torch.empty_like(codes, dtype=torch.float32)
    codec.decode_(in_memory_order(values), in_memory_order(codes), scales)
    return values


def encode_again_(codec: StateCodec, codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Encode `values` to `codes` and `scales`. Values that were decoded from the same blocks are kept exactly.

    The scale of a block follows from its largest value. If the first encoding rounded that value up to a power of two,
    it now requires twice the scale, and the smallest codes would lose a bit. So values are also encoded with the
    largest one reduced by a factor of 1 - 2**-20, which is rounded up again; each block keeps the more exact result.
    """
    codec.encode_(codes, scales, values)
    is_exact = values_of(codec, codes, scales) == values
    if is_exact.all():
        return
    magnitudes = _rows(values.abs(), codec.block)
    is_largest = (magnitudes == magnitudes.amax(1, keepdim=True)).view(-1)[: len(values)]
    reduced = torch.where(is_largest, values * (1 - 2.0**-20), values)
    codec.encode_(codes, scales, reduced)
    is_exact_reduced = values_of(codec, codes, scales) == values
    keeps = _rows(is_exact, codec.block).sum(1) >= _rows(is_exact_reduced, codec.block).sum(1)
    keeps = keeps.repeat_interleave(codec.block)[: len(values)]
    codec.encode_(codes, scales, torch.where(keeps, values, reduced))


def _rows(flat: Tensor, block: int) -> Tensor:
    """View a flat tensor as one row for each block; the last row is padded with zeros."""
    return torch.cat([flat, flat.new_zeros(-len(flat) % block)]).view(-1, block)
