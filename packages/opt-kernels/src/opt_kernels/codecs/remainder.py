"""The bf16 + int16 remainder, in torch: a float32 number whose upper half is the model's bfloat16 weight.

The word of a float32 w is split into halves. The lower half, read as a signed int16, is the remainder; if it is
negative, the upper half is raised by one. So the upper half is w rounded to nearest, ties away from zero, and

    word(w) = word(weight) * 2^16 + remainder        (modulo 2^32)

which is exact for every w except NaN: raising 0x7FFF would give 0x8000, which is minus zero, and the NaN would vanish
from the model. NaN is stored as the quiet NaN (0x7FC0, 0) instead.

An int8 remainder is that of a float32 rounded to nearest even in its upper 24 bits, which are split alike:

    word(w) >> 8 = word(weight) * 2^8 + remainder        (after rounding)

So the weight is the 24-bit value rounded to nearest, ties away from zero. Values that were joined are split into the
same bits again. The relative error of a normal number is at most 2^-16. (FlashOptim, arXiv 2602.23349, section 3, also
keeps 8 bits: the difference from the weight, as an integer multiple of 1/254 of the weight's last place.)
"""

import torch
from torch import Tensor

QUIET_NAN = 0x7FC0
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


def join_short(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 numbers of `weight` (bfloat16) and `remainder` (int8), both of one shape."""
    word = weight.view(torch.int16).to(torch.int32)
    return word.mul_(1 << 8).add_(remainder).mul_(1 << 8).view(torch.float32)


def split_short_(weight: Tensor, remainder: Tensor, main: Tensor) -> None:
    """Write `main` float32, rounded to 24 bits, to `weight` bfloat16 and `remainder` int8, all of one shape.

    Needs 9 bytes an element for a time.
    """
    nan, word = main.isnan(), main.view(torch.int32)
    rounded = (word >> 8).bitwise_and_(1).add_(0x7F).add_(word).bitwise_right_shift_(8)
    upper = (rounded + 0x80).bitwise_right_shift_(8)
    remainder.copy_(rounded.sub_(upper, alpha=1 << 8).masked_fill_(nan, 0))
    weight.view(torch.int16).copy_(upper.masked_fill_(nan, QUIET_NAN))


def _wrapped(word: Tensor, bits: int) -> Tensor:
    """`word` as a signed number of `bits` bits."""
    half = 1 << (bits - 1)
    return ((word + half) & ((1 << bits) - 1)) - half
