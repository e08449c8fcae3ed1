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

States take the upper bits of words that cost less: one hash for 64 elements, and multiples of the golden ratio between
them. The words of one element in different steps, and those of different states, are unrelated.

    word(i) of state k, counted from 1  =  word(i >> 6), at step + k * 0x632BE5AB, + (i & 63) * 0x9E3779B9
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
    lower = main.view(torch.int32)
    if remainder.dtype is torch.int8:
        lower = (lower >> 8).bitwise_and_(1).add_(0x7F).add_(lower).bitwise_right_shift_(8)  # 24 bits, rounded
        upper = (lower + 0x80).bitwise_right_shift_(8)
        lower.sub_(upper, alpha=1 << 8)
    else:
        upper = (lower + 0x8000).bitwise_right_shift_(16)
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
NOISE_BLOCK = 64  # elements of a state that share a hash


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
    fixed = size.view(torch.int32) - ((126 + exponent) << 23)
    if exponent > -126:
        small = size.clamp(max=limits.smallest_normal) * 2.0 ** (23 - exponent)
        fixed = torch.where(size < limits.smallest_normal, small.to(torch.int32), fixed)
    rounded = fixed.add_(upper_bits(words, shift)).bitwise_right_shift_(shift)
    bits = 8 * target.dtype.itemsize
    sign = values.signbit().to(torch.int32) << (bits - 1)
    target.view(torch.int16 if bits == 16 else torch.uint8).copy_(rounded.bitwise_or_(sign))
    if target.dtype is torch.bfloat16 and not _is_known_finite(values):
        target.copy_(torch.where(values.isfinite(), target, values.to(torch.bfloat16)))


def rounded_to_integers(values: Tensor, words: Tensor) -> Tensor:
    """`values` (n,) float32, of at most 255, rounded stochastically to int32: with 16 bits of their fraction, plus
    noise, which is odd so that a code whose product was rounded down stays."""
    fixed = (values.clamp(max=255) * 65536.0).to(torch.int32)
    return fixed.add_(upper_bits(words, 16).bitwise_or_(1)).bitwise_right_shift_(16)


def noise(numel: int, *, first: int, step: int, device: torch.device) -> Tensor:
    """The noise words, (numel,) int32, of the elements from index `first` on."""
    upper, lower = divmod(first, WORD + 1)
    if lower + numel > WORD + 1:  # the key changes within the run
        size = WORD + 1 - lower
        before = noise(size, first=first, step=step, device=device)
        after = noise(numel - size, first=first + size, step=step, device=device)
        return torch.cat([before, after])
    key = _mix_(torch.tensor([_signed(step + upper * GOLDEN)], dtype=torch.int32, device=device))
    index = torch.arange(numel, dtype=torch.int32, device=device).add_(_signed(lower))
    return _scramble_(index.bitwise_xor_(key))


def noise_of_state(numel: int, *, first: int, step: int, number: int, device: torch.device) -> Tensor:
    """The noise words, (numel,) int32, of the `number`-th state, from 1, for the elements from index `first` on."""
    block, offset = divmod(first, NOISE_BLOCK)
    count = -(-(offset + numel) // NOISE_BLOCK)
    of_blocks = noise(count, first=block, step=step + number * STREAM, device=device)
    within = torch.arange(NOISE_BLOCK, dtype=torch.int32, device=device).mul_(_signed(GOLDEN))
    return (of_blocks[:, None] + within).view(-1)[offset : offset + numel]


def upper_bits(words: Tensor, count: int) -> Tensor:
    """The upper `count` bits of words (int32), as integers from 0 on: a new tensor."""
    return (words >> (32 - count)).bitwise_and_((1 << count) - 1)


def _scramble_(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (int32) in which the upper output bits depend on every input bit, in place.

    The masks clear the copies of the sign bit that the shift of an int32 makes.
    """
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x7FEB352D))
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))


def _mix_(x: Tensor) -> Tensor:
    """A bijection of 32-bit words (int32) in which every output bit depends on every input bit, in place."""
    x = _scramble_(x)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _signed(word: int) -> int:
    """The int32 with the lower 32 bits of `word`."""
    return (word + (1 << 31) & WORD) - (1 << 31)
