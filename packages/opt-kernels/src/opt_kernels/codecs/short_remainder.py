"""The bf16 + int8 remainder, in torch: a 24-bit number whose upper 16 bits are the model's bfloat16 weight.

A float32 main value is rounded to nearest even in its upper 24 bits, which are split as `codecs.remainder` splits 32:

    word(w) >> 8 = word(weight) * 2^8 + remainder        (after rounding)

So the weight is the 24-bit value rounded to nearest, ties away from zero. Values that were joined are split into the
same bits again. The relative error of a normal number is at most 2^-16. (FlashOptim, arXiv 2602.23349, section 3, also
keeps 8 bits: the difference from the weight, as an integer multiple of 1/254 of the weight's last place.)
"""

import torch
from torch import Tensor

QUIET_NAN = 0x7FC0


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
