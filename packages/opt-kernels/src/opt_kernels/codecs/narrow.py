"""Narrow mains, in torch: bfloat16 weights with the rest of a float32 beside them; and stochastic rounding.

**Remainders.** The upper half of a float32 number is the model's bfloat16 weight.

The word of a float32 w is split into halves. The lower half, read as a signed int16, is the remainder; if it is
negative, the upper half is raised by one. So the upper half is w rounded to nearest, ties away from zero, and

    word(w) = word(weight) * 2^16 + remainder        (modulo 2^32)

which is exact for every w except NaN: raising 0x7FFF would give 0x8000, which is minus zero, and the NaN would vanish
from the model. NaN is stored as the quiet NaN (0x7FC0, 0) instead.

With an int8 remainder, w is first rounded to its upper 24 bits, to nearest even. These bits are split in the same way:

    word(w) >> 8 = word(weight) * 2^8 + remainder        (after rounding)

So the weight is the 24-bit value rounded to nearest, ties away from zero. Values that were joined are split into the
same bits again. The relative error of a normal number is at most 2^-16. (FlashOptim, arXiv 2602.23349, section 3, also
keeps 8 bits: the difference from the weight, as an integer multiple of 1/254 of the weight's last place.)

**Stochastic rounding.** A float32 becomes one of its two neighbours in a narrower format, the nearer one more often.
For bfloat16,

    word(w) <- (word(w) + noise) with its lower 16 bits cleared,      noise uniform in 0 .. 65535

so that the expected result is w. The noise of an element is a hash of the step and of the element's index, not a random
draw. It therefore does not depend on how a parameter is divided over ranks, tiles or threads, nor on the device, and a
resumed run repeats it.

    scramble(x):  x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B      (32 bits)
    mix(x):       scramble(x);  x ^= x >> 16                                           ("lowbias32")
    word(i)     = scramble(lower(i) ^ mix(step + upper(i) * 0x9E3779B9))

where lower and upper are the 32-bit halves of the element's index i, and the noise of a main is the upper half of its
word. Infinities and NaN are cast without noise.

States take the upper bits of words that cost less: one hash for 128 elements, and multiples of the golden ratio between
them. The words of one element in different steps, and those of different states, are unrelated.

    word(i) of state k, counted from 1  =  word(i >> 7), at step + k * 0x632BE5AB, ^ (i mod period) * 0x9E3779B9

where the period is 128, or 32 for 8-bit integers: processors keep 32 words in registers.
"""

import math

import torch
from torch import Tensor

QUIET_NAN = 0x7FC0
REMAINDERS = (torch.int16, torch.int8)  # dtypes


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 numbers with the halves `weight` (bfloat16) and `remainder` (int16 or int8), both of one shape."""
    main = weight.detach().float()  # shifts the bits by 16; the integer sum wraps around, as in the formula
    main.view(torch.int32).add_(remainder, alpha=1 << 8 if remainder.dtype is torch.int8 else 1)
    return main


def split_(weight: Tensor, remainder: Tensor, main: Tensor) -> None:
    """Write the halves of `main` (float32) to `weight` (bfloat16) and `remainder` (int16 or int8), of one shape."""
    word = main.view(torch.int32)
    if remainder.dtype is torch.int8:
        lower = (word >> 8) & 1
        lower += 0x7F
        lower += word
        lower >>= 8  # 24 bits, rounded
        upper = lower + 0x80
        upper >>= 8
        lower.sub_(upper, alpha=1 << 8)
    else:
        lower = word
        upper = word + 0x8000
        upper >>= 16
    weight.view(torch.int16).copy_(upper)
    remainder.copy_(lower)  # as an integer: the lower bits
    if not _is_known_finite(main):
        nan = main.isnan()
        weight.view(torch.int16).masked_fill_(nan, QUIET_NAN)
        remainder.masked_fill_(nan, 0)


def _is_known_finite(values: Tensor) -> bool:
    """Whether a sum shows that all are finite: on a CPU it takes a tenth of the time of looking at each. The host reads
    no tensor of another device."""
    return values.device.type == "cpu" and bool(values.sum().isfinite())


WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
STREAM = 0x632BE5AB
NOISE_BLOCK = 128  # elements of a state that share a hash
PERIOD_OF_INTEGERS = 32


def round_(target: Tensor, values: Tensor, words: Tensor) -> None:
    """Write `values` (n,) float32, rounded stochastically by noise `words` (n,), to `target` (n,) of a narrower dtype.
    They are below its largest number; infinities and NaN are for bfloat16 only.

    A code is an integer. With its fraction in the lower bits of a word it is the word of a float32 with another bias;
    below the smallest normal number, a multiple of the smallest code.
    """
    limits = torch.finfo(target.dtype)
    exponent = round(math.log2(limits.smallest_normal))
    shift = 23 + round(math.log2(limits.eps))
    size = values.abs()
    word = size.view(torch.int32) - ((126 + exponent) << 23)
    if exponent > -126:
        small = size.clamp(max=limits.smallest_normal)
        small *= 2.0 ** (23 - exponent)
        is_small = size < limits.smallest_normal
        word = torch.where(is_small, small.to(torch.int32), word)
    word += upper_bits(words, shift)
    word >>= shift
    bits = 8 * target.dtype.itemsize
    sign = values.signbit().to(torch.int32)
    word |= sign << (bits - 1)
    codes = target.view(torch.int16 if bits == 16 else torch.uint8)
    codes.copy_(word)
    if target.dtype is torch.bfloat16 and not _is_known_finite(values):
        nearest = values.to(torch.bfloat16)
        target.copy_(torch.where(values.isfinite(), target, nearest))


def rounded_to_integers(products: Tensor, words: Tensor) -> Tensor:
    """Products of two float32 numbers, (n,) float64 of magnitude below 256, rounded stochastically to float32 integers:

        round(fma(a, b, u)),      u = (4 w + 2) / 2^16 - 1/2 with the upper 14 bits w of a word

    in float32, ties to even. A decoded number, if normal, gets its code again, and so the largest number of a block the
    largest code: its product is off by less than 1.5 of the largest units that a sum has, 2^-16, and u differs from
    -1/2 and 1/2 by at least 2.
    """
    noise = upper_bits(words, 14).double()
    noise *= 2.0**-14
    noise += 2.0**-15 - 0.5
    return noise.add_(products).float().round_()


def noise(numel: int, *, first: int, step: int, device: torch.device) -> Tensor:
    """The noise words, (numel,) int32, of the elements from index `first` on."""
    upper, lower = divmod(first, WORD + 1)
    if lower + numel > WORD + 1:  # the key changes within the run
        size = WORD + 1 - lower
        before = noise(size, first=first, step=step, device=device)
        after = noise(numel - size, first=first + size, step=step, device=device)
        return torch.cat([before, after])
    seed = _signed(step + upper * GOLDEN)
    key = _mix_(torch.tensor([seed], dtype=torch.int32, device=device))
    index = torch.arange(numel, dtype=torch.int32, device=device)
    index += _signed(lower)
    index ^= key
    return _scramble_(index)


def noise_of_state(numel: int, *, first: int, step: int, number: int, period: int, device: torch.device) -> Tensor:
    """The noise words, (numel,) int32, of the `number`-th state, from 1, for the elements from index `first` on."""
    block, offset = divmod(first, NOISE_BLOCK)
    end = offset + numel
    stream = step + number * STREAM
    of_blocks = noise(-(-end // NOISE_BLOCK), first=block, step=stream, device=device)
    within = torch.arange(NOISE_BLOCK, dtype=torch.int32, device=device) % period
    within *= _signed(GOLDEN)
    words = of_blocks[:, None] ^ within
    return words.view(-1)[offset:end]


def upper_bits(words: Tensor, count: int) -> Tensor:
    """The upper `count` bits of words (int32), as integers from 0 on: a new tensor."""
    upper = words >> (32 - count)
    upper &= (1 << count) - 1
    return upper


def _scramble_(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (int32) in which the upper output bits depend on every input bit, in place.

    The masks clear the copies of the sign bit that the shift of an int32 makes.
    """
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(0x7FEB352D)
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(0x846CA68B)
    return x


def _mix_(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (int32) in which every output bit depends on every input bit, in place."""
    x = _scramble_(x)
    x ^= (x >> 16) & 0xFFFF
    return x


def _signed(word: int) -> int:
    """The int32 with the lower 32 bits of `word`."""
    return (word + (1 << 31) & WORD) - (1 << 31)
