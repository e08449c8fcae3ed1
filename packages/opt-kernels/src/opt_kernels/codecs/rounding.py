"""Stochastic rounding, in torch: a float32 becomes one of its two bfloat16 neighbours, the nearer one more often.

    word(w) <- (word(w) + noise) with its lower 16 bits cleared,      noise uniform in 0 .. 65535

so that the expected result is w. The noise of an element is a hash of the step and of the element's index, not a random
draw. It therefore does not depend on how a parameter is divided over ranks, tiles or threads, nor on the device.

    mix(x):   x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16      (32 bits, "lowbias32")
    noise(i) = mix(lower(i) ^ mix(step + upper(i) * 0x9E3779B9)) >> 16

where lower and upper are the 32-bit halves of the element's index i. Infinities and NaN are cast without noise.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9


def round_(target: Tensor, values: Tensor, *, first: int, step: int) -> None:
    """Write `values` (n,) float32, rounded, to `target` (n,) bfloat16. `first` is the index of the first element."""
    word = noise(values.numel(), first=first, step=step, device=values.device).add_(values.view(torch.int32))
    finite = word.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
    target.copy_(torch.where(values.isfinite(), finite, values.to(torch.bfloat16)))


def noise(numel: int, *, first: int, step: int, device: torch.device) -> Tensor:
    """The noise in 0 .. 65535, (numel,) int32, of the elements from index `first` on."""
    upper, lower = divmod(first, WORD + 1)
    if lower + numel > WORD + 1:  # the key changes within the run
        size = WORD + 1 - lower
        parts = ((size, first), (numel - size, first + size))
        return torch.cat([noise(n, first=at, step=step, device=device) for n, at in parts])
    key = mix_(torch.tensor([_signed(step + upper * GOLDEN)], dtype=torch.int32, device=device))
    index = torch.arange(lower, lower + numel, device=device).to(torch.int32)
    return mix_(index.bitwise_xor_(key)).bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def mix_(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (int32) in which every output bit depends on every input bit, in place.

    The masks clear the copies of the sign bit that the shift of an int32 makes.
    """
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x7FEB352D))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(word: int) -> int:
    """The int32 with the lower 32 bits of `word`."""
    return (word + (1 << 31) & WORD) - (1 << 31)
