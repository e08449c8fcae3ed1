"""The bf16 + int16 remainder as device functions. `opt_kernels.codecs.remainder` defines the scheme."""

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
