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
    main = weight.float()  # shifts the bits by 16; the integer sum wraps around, as in the formula
    main.view(torch.int32).add_(remainder, alpha=1 << 8 if remainder.dtype is torch.int8 else 1)
    return main


def split_(weight: Tensor, remainder: Tensor, main: Tensor) -> None:
    """Write the halves of `main` (float32) to `weight` (bfloat16) and `remainder` (int16 or int8), of one shape."""
    nan, lower = main.isnan(), main.view(torch.int32)
    if remainder.dtype is torch.int8:
        lower = (lower >> 8).bitwise_and_(1).add_(0x7F).add_(lower).bitwise_right_shift_(8)  # 24 bits, rounded
        upper = (lower + 0x80).bitwise_right_shift_(8)
        lower.sub_(upper, alpha=1 << 8)
    else:
        upper = (lower + 0x8000).bitwise_right_shift_(16)
    weight.view(torch.int16).copy_(upper.masked_fill_(nan, QUIET_NAN))
    remainder.copy_(lower.masked_fill(nan, 0))  # as an integer: the lower bits
