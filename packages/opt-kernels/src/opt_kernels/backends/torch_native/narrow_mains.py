"""Mains with remainders and stochastic rounding, in few passes over tiles that fit the cache: the bits of `codecs`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opt_kernels.codecs import remainder, rounding

_UPPER = 1 << 32


def join_(mains: Sequence[Tensor], weights: Sequence[Tensor], remainders: Sequence[Tensor]) -> None:
    """Write to `mains` (n,) float32 the numbers with halves `weights` (bfloat16) and `remainders`, of one dtype."""
    # Converting bfloat16 to float32 shifts its bits by 16. The integer sum wraps around, as in the formula.
    torch._foreach_copy_(list(mains), list(weights))
    words = [main.view(torch.int32) for main in mains]
    torch._foreach_add_(words, list(remainders), alpha=1 << 8 if remainders[0].dtype is torch.int8 else 1)


def split_(weights: Sequence[Tensor], remainders: Sequence[Tensor], row: Tensor, *, words: Tensor) -> None:
    """Write the halves of `row` (n,) float32 to `weights` and `remainders`, which have n elements in all.

    `words` (n,) int32 is overwritten.
    """
    numels = [weight.numel() for weight in weights]
    # A finite sum excludes NaN. A sum that overflows without a NaN only costs the slow path.
    if remainders[0].dtype is torch.int8 or not bool(row.sum().isfinite()):
        for weight, rest, main in zip(weights, remainders, torch.split(row, numels)):
            remainder.split_(weight, rest, main)
        return
    word = row.view(torch.int32)
    torch._foreach_copy_(list(remainders), list(torch.split(word, numels)))
    torch.add(word, 0x8000, out=words).bitwise_right_shift_(16)
    torch._foreach_copy_([weight.view(torch.int16) for weight in weights], list(torch.split(words, numels)))


def round_(target: Tensor, values: Tensor, *, first: int, step: int) -> None:
    """Write `values` (n,) float32, rounded, to `target` (n,) bfloat16. `first` is the index of the first element."""
    last = first + values.numel() - 1
    # At a multiple of 2^32 the key changes within the run. Adding noise to infinities or NaN would change them.
    if first // _UPPER != last // _UPPER or not bool(values.sum().isfinite()):
        rounding.round_(target, values, first=first, step=step)
        return
    key = rounding.mix(torch.tensor((step + first // _UPPER * rounding.GOLDEN) & rounding.WORD))
    lower = torch.arange(first % _UPPER, first % _UPPER + values.numel(), device=values.device)
    word = _mixed_(lower.to(torch.int32).bitwise_xor_(_signed(int(key))))
    noise = word.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    upper = noise.add_(values.view(torch.int32)).bitwise_right_shift_(16)
    target.view(torch.int16).copy_(upper)


def _mixed_(x: Tensor) -> Tensor:
    """`codecs.rounding.mix` on int32 words. The masks clear the copies of the sign bit that an int32 shift makes."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x7FEB352D))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(word: int) -> int:
    """The int32 with the bits of this 32-bit word."""
    return word - _UPPER if word >= _UPPER >> 1 else word
