"""Stochastic rounding with wrapping 32-bit words: bit for bit as `reference`, with half the temporary memory."""

import torch
from torch import Tensor

from opt_kernels.codecs import rounding as reference

_UPPER = 1 << 32


def round_(target: Tensor, values: Tensor, *, first: int, step: int) -> None:
    """Write `values` (n,) float32, rounded, to `target` (n,) bfloat16. `first` is the index of the first element."""
    last = first + values.numel() - 1
    # At a multiple of 2^32 the key changes within the run. Adding noise to infinities or NaN would change them.
    if first // _UPPER != last // _UPPER or not bool(values.sum().isfinite()):
        reference.round_(target, values, first=first, step=step)
        return
    key = reference.mix(torch.tensor((step + first // _UPPER * reference.GOLDEN) & reference.WORD))
    lower = torch.arange(first % _UPPER, first % _UPPER + values.numel(), device=values.device)
    word = _mixed_(lower.to(torch.int32).bitwise_xor_(_signed(int(key))))
    noise = word.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    upper = noise.add_(values.view(torch.int32)).bitwise_right_shift_(16)
    target.view(torch.int16).copy_(upper)


def _mixed_(x: Tensor) -> Tensor:
    """`reference.mix` on int32 words. The masks clear the copies of the sign bit that an int32 shift makes."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x7FEB352D))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(word: int) -> int:
    """The int32 with the bits of this 32-bit word."""
    return word - _UPPER if word >= _UPPER >> 1 else word
