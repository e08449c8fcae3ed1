"""Remainders as device functions. `opt_kernels.codecs.remainder` and `codecs.short_remainder` define the schemes."""

from opt_kernels.backends.triton.jit import jit, tl


@jit
def join(weight: tl.tensor, remainder: tl.tensor) -> tl.tensor:
    """The float32 numbers whose halves are `weight` and `remainder`, both int16 words."""
    word = (weight.to(tl.int32) << 16) + remainder.to(tl.int32)
    return word.to(tl.float32, bitcast=True)


@jit
def upper_half(main: tl.tensor) -> tl.tensor:
    """The bfloat16 weight of `main` (float32), as an int16 word: rounded to nearest, ties away from zero."""
    # Unsigned, because the largest NaN wraps around: compilers assume that signed integers never overflow.
    word = main.to(tl.uint32, bitcast=True)
    upper = ((word + 0x8000) >> 16).to(tl.uint16)
    return tl.where(main == main, upper, 0x7FC0).to(tl.int16, bitcast=True)


@jit
def lower_half(main: tl.tensor) -> tl.tensor:
    """The int16 remainder of `main` (float32); 0 for a NaN."""
    word = main.to(tl.uint32, bitcast=True)
    return tl.where(main == main, word.to(tl.uint16), 0).to(tl.int16, bitcast=True)


@jit
def join_short(weight: tl.tensor, remainder: tl.tensor) -> tl.tensor:
    """The float32 numbers of `weight`, int16 words, and `remainder`, int8."""
    word = ((weight.to(tl.int32) << 8) + remainder.to(tl.int32)) << 8
    return word.to(tl.float32, bitcast=True)


@jit
def rounded_short(main: tl.tensor) -> tl.tensor:
    """The 24 bits (uint32) of `main` (float32), rounded to nearest, ties to even; 0x7FC000 for a NaN."""
    word = main.to(tl.uint32, bitcast=True)
    rounded = (word + 0x7F + ((word >> 8) & 1)) >> 8
    return tl.where(main == main, rounded, 0x7FC000).to(tl.uint32)


@jit
def upper_short(rounded: tl.tensor) -> tl.tensor:
    """The bfloat16 weight of 24 bits, as an int16 word."""
    return ((rounded + 0x80) >> 8).to(tl.uint16).to(tl.int16, bitcast=True)


@jit
def lower_short(rounded: tl.tensor) -> tl.tensor:
    """The int8 remainder of 24 bits."""
    return rounded.to(tl.uint8).to(tl.int8, bitcast=True)
