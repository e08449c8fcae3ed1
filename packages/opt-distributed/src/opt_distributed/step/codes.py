"""Values kept as codes: decoded from them, and encoded again without loss after they were saved as fp32."""

import torch
from torch import Tensor

from opt_kernels.codecs import StateCodec


def values_of(codec: StateCodec, codes: Tensor, scales: Tensor) -> Tensor:
    """The values of `codes`, in their shape: a new fp32 tensor."""
    values = torch.empty(codes.numel(), dtype=torch.float32, device=codes.device)
    codec.decode_(values, codes.view(-1), scales)
    return values.view(codes.shape)


def encode_again_(codec: StateCodec, codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Writes `codes` and `scales`, so that what was decoded from these very blocks keeps its values.

    A scale follows from a block's largest value. Where that was rounded up to a power of two when it was first encoded,
    it asks for twice its scale now, and the smallest codes would lose a bit. A hair smaller, it is rounded up again.
    """
    codec.encode_(codes, scales, values)
    came_back = values_of(codec, codes, scales) == values
    if came_back.all():
        return
    sizes = _rows(values.abs(), codec.block)
    is_top = (sizes == sizes.amax(1, keepdim=True)).view(-1)[: len(values)]
    smaller = torch.where(is_top, values * (1 - 2.0**-20), values)
    codec.encode_(codes, scales, smaller)
    comes_back = values_of(codec, codes, scales) == values
    is_kept = (_rows(came_back, codec.block).sum(1) >= _rows(comes_back, codec.block).sum(1)).repeat_interleave(
        codec.block
    )
    codec.encode_(codes, scales, torch.where(is_kept[: len(values)], values, smaller))


def _rows(flat: Tensor, block: int) -> Tensor:
    """One row for each block of a run; the last is filled up with zeros."""
    return torch.cat([flat, flat.new_zeros(-len(flat) % block)]).view(-1, block)
