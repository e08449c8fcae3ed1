"""The bf16 + int16 remainder, in torch: a float32 number whose upper half is the model's bfloat16 weight.

The word of a float32 w is split into halves. The lower half, read as a signed int16, is the remainder; if it is
negative, the upper half is raised by one. So the upper half is w rounded to nearest, ties away from zero, and

    word(w) = word(weight) * 2^16 + remainder        (modulo 2^32)

which is exact for every w except NaN: raising 0x7FFF would give 0x8000, which is minus zero, and the NaN would vanish
from the model. NaN is stored as the quiet NaN (0x7FC0, 0) instead.

An int8 remainder is that of a number rounded to 24 bits, see `codecs.short_remainder`.
"""

import torch
from torch import Tensor

from opt_kernels.codecs.short_remainder import QUIET_NAN, join_short, split_short_

REMAINDERS = (torch.int16, torch.int8)  # dtypes


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 numbers with the halves `weight` (bfloat16) and `remainder` (int16 or int8), both of one shape."""
    if remainder.dtype is torch.int8:
        return join_short(weight, remainder)
    word = (weight.view(torch.int16).to(torch.int64) << 16) + remainder.to(torch.int64)
    return _wrapped(word, 32).to(torch.int32).view(torch.float32)


def split_(weight: Tensor, remainder: Tensor, main: Tensor) -> None:
    """Write the halves of `main` (float32) to `weight` (bfloat16) and `remainder` (int16 or int8), of one shape."""
    if remainder.dtype is torch.int8:
        split_short_(weight, remainder, main)
        return
    word = main.view(torch.int32).to(torch.int64)
    upper = _wrapped((word + 0x8000) >> 16, 16)
    lower = _wrapped(word, 16)
    nan = main.isnan()
    weight.view(torch.int16).copy_(upper.masked_fill(nan, QUIET_NAN))
    remainder.copy_(lower.masked_fill(nan, 0))


def _wrapped(word: Tensor, bits: int) -> Tensor:
    """`word` as a signed number of `bits` bits."""
    half = 1 << (bits - 1)
    return ((word + half) & ((1 << bits) - 1)) - half
