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
    word = values.view(torch.int32).to(torch.int64) & WORD
    upper = ((word + noise(values.numel(), first=first, step=step, device=values.device)) >> 16) & 0xFFFF
    finite = ((upper + 0x8000) % 0x10000 - 0x8000).to(torch.int16).view(torch.bfloat16)
    target.copy_(torch.where(values.isfinite(), finite, values.to(torch.bfloat16)))


def noise(numel: int, *, first: int, step: int, device: torch.device) -> Tensor:
    """The noise in 0 .. 65535, (numel,) int64, of the elements from index `first` on."""
    index = torch.arange(first, first + numel, device=device)
    key = mix((step + (index >> 32) * GOLDEN) & WORD)
    return mix((index & WORD) ^ key) >> 16


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words, stored in int64, in which every output bit depends on every input bit."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & WORD
    return x ^ (x >> 16)
