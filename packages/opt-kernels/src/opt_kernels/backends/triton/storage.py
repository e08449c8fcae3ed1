"""Reading mains into float32 registers and writing them back in their storage dtype, inside a Triton sweep.

`opt_kernels.codecs.remainder` defines remainders, `codecs.rounding` stochastic rounding: these have the same bits.
"""

from opt_kernels.backends.triton.jit import jit, tl
from opt_kernels.backends.triton.lanes import load, nearest, store


@jit
def read_main(
    main: tl.tensor,  # pointer; to the remainders if REMAINDER
    out: tl.tensor,  # pointer; to the weights as int16 words if REMAINDER
    at: tl.tensor,
    n: tl.tensor,
    REMAINDER: tl.constexpr,
    FULL: tl.constexpr,
) -> tl.tensor:
    """The mains as float32."""
    if REMAINDER and main.dtype.element_ty == tl.int8:
        return join_short(load(out, at, n, FULL), load(main, at, n, FULL))
    elif REMAINDER:
        return join(load(out, at, n, FULL), load(main, at, n, FULL))
    else:
        return load(main, at, n, FULL).to(tl.float32)


@jit
def write_main(
    main: tl.tensor,
    out: tl.tensor,
    p: tl.tensor,  # float32, the new mains
    at: tl.tensor,
    n: tl.tensor,
    first: tl.tensor,  # int64, number of the chunk's first element
    step: tl.tensor,  # int32
    MAIN: tl.constexpr,  # dtype of the main, or of the remainders
    OUT: tl.constexpr,  # dtype of the out, or None
    REMAINDER: tl.constexpr,
    STOCHASTIC_ROUNDING: tl.constexpr,  # whether a bfloat16 main is rounded stochastically
    FULL: tl.constexpr,
) -> None:
    """Write the mains and their rounded copy, or both halves."""
    if REMAINDER and tl.int8 == MAIN:
        rounded = rounded_short(p)
        store(out, at, n, upper_short(rounded), FULL)
        store(main, at, n, lower_short(rounded), FULL)
    elif REMAINDER:
        store(out, at, n, upper_half(p), FULL)
        store(main, at, n, lower_half(p), FULL)
    else:
        if STOCHASTIC_ROUNDING and tl.bfloat16 == MAIN:
            store(main, at, n, round_stochastically(p, at, first, step), FULL)
        else:
            store(main, at, n, nearest(p, MAIN), FULL)
        if OUT is not None:
            store(out, at, n, nearest(p, OUT), FULL)


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


@jit
def mix(x: tl.tensor) -> tl.tensor:
    """A bijection of uint32 words in which every output bit depends on every input bit."""
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@jit
def noise(at: tl.tensor, first: tl.tensor, step: tl.tensor) -> tl.tensor:
    """Noise in 0 .. 65535 for the elements with index `first` (int64) + `at` (int32) at `step` (int32)."""
    golden = tl.full((), 0x9E3779B9, tl.uint32)
    base = first.to(tl.uint32)
    upper = (first >> 32).to(tl.uint32)
    count = step.to(tl.uint32, bitcast=True)
    lower = base + at.to(tl.uint32)
    # A run may cross one multiple of 2^32. Computing both scalar keys is cheaper than a key per element.
    key = tl.where(lower < base, mix(count + (upper + 1) * golden), mix(count + upper * golden))
    return mix(lower ^ key) >> 16


@jit
def round_stochastically(x: tl.tensor, at: tl.tensor, first: tl.tensor, step: tl.tensor) -> tl.tensor:
    """Round `x` (float32) to one of its two bfloat16 neighbours. Infinities and NaN are unchanged."""
    word = x.to(tl.uint32, bitcast=True)
    rounded = ((word + noise(at, first, step)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where((word & 0x7F800000) != 0x7F800000, rounded, nearest(x, tl.bfloat16))
