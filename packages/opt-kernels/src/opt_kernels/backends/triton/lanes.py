"""Device functions that Triton sweeps share: aligned pointers, loads and stores of tiles, rounding and arithmetic, and
mains, which are read as float32 and written in their storage dtype.

`opt_kernels.codecs.narrow` defines remainders and stochastic rounding: these have the same bits.
"""

from opt_kernels.backends.triton import INTERPRETED, jit, tl


@jit
def pointer(address: tl.tensor, dtype: tl.constexpr, E: tl.constexpr) -> tl.tensor:
    """`address` (int64) as a pointer to `dtype` that is aligned to `E` elements.

    The hint must follow the cast: on the integer it is lost, and 16-bit tensors are then read one element at a time.
    """
    typed = address.to(tl.pointer_type(dtype))
    BITS: tl.constexpr = typed.dtype.element_ty.primitive_bitwidth
    return tl.multiple_of(typed, E * (BITS // 8))


@jit
def load(base: tl.tensor, at: tl.tensor, n: tl.tensor, FULL: tl.constexpr) -> tl.tensor:
    """Elements `at` of the run, zero beyond its end `n`. A full chunk needs no mask.

    A mask prevents wide loads even if it is all true, so every tile has two versions.
    """
    if FULL:
        return tl.load(base + at)
    else:
        return tl.load(base + at, mask=at < n, other=0)


@jit
def store(base: tl.tensor, at: tl.tensor, n: tl.tensor, value: tl.tensor, FULL: tl.constexpr) -> None:
    """Write `value`, which has the dtype of the run, to its elements `at`."""
    if FULL:
        tl.store(base + at, value)
    else:
        tl.store(base + at, value, mask=at < n)


@jit
def nearest(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """`x` (float32) in `dtype`, rounded to nearest, ties to even; NaN stays NaN."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        upper = tl.where(x == x, upper, 0x7FC0)
        return upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@jit
def decayed(x: tl.tensor, decay: tl.tensor, p: tl.tensor) -> tl.tensor:
    """x + decay * p, or x where `decay` is zero: zero times an infinite p would be NaN."""
    # A branch instead of `tl.where`, with which ptxas ran out of registers on sm_80 and sm_100.
    if decay != 0.0:
        x += decay * p
    return x


@jit
def divide(x: tl.tensor, y: tl.tensor, IEEE: tl.constexpr) -> tl.tensor:
    """x / y in float32: rounded correctly, or to within two units in the last place by the hardware's reciprocal."""
    if IEEE:
        return tl.div_rn(x, y)
    else:
        return x / y


@jit
def root(x: tl.tensor, IEEE: tl.constexpr) -> tl.tensor:
    """The square root of x in float32: rounded correctly, or the hardware's approximation."""
    if IEEE:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@jit
def sign(x: tl.tensor) -> tl.tensor:
    """-1, 0 or 1; NaN for NaN, so that a NaN gradient is not hidden."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, x))


@jit
def larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The larger of the two; NaN if either is NaN."""
    return tl.where(a != a, a, tl.where(a > b, a, b))  # not `|`: either may be a scalar


@jit
def smaller(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The smaller of the two; NaN if either is NaN."""
    return tl.where(a != a, a, tl.where(a < b, a, b))


@jit
def tanh(x: tl.tensor) -> tl.tensor:
    """The hyperbolic tangent of x (float64)."""
    size = tl.abs(x)
    square = x * x
    # Below 1/4, where the difference would cancel, Lambert's continued fraction.
    near = x / (1.0 + square / (3.0 + square / (5.0 + square / (7.0 + square / (9.0 + square / 11.0)))))
    far = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.25, near, tl.where(x < 0, -far, far))


@jit
def raised(base: tl.tensor, exponent: tl.tensor) -> tl.tensor:
    """base^exponent, in float64 rounded to float32; NaN for a base below 0 and an exponent that is not whole."""
    b = tl.cast(base, tl.float64)
    e = tl.cast(exponent, tl.float64)
    size = tl.where(e == 0.0, 1.0, tl.exp(e * tl.log(tl.abs(b))))
    is_odd = e - 2.0 * tl.floor(e * 0.5) == 1.0
    signed = tl.where(tl.floor(e) == e, tl.where(is_odd, -size, size), float("nan"))
    return tl.where(b < 0.0, signed, size).to(tl.float32)


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
        if STOCHASTIC_ROUNDING:
            store(main, at, n, round_stochastically(p, noise(at, first, step)), FULL)
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
def scramble(x: tl.tensor) -> tl.tensor:
    """A bijection of uint32 words in which the upper output bits depend on every input bit."""
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    return (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)


@jit
def mix(x: tl.tensor) -> tl.tensor:
    """A bijection of uint32 words in which every output bit depends on every input bit."""
    x = scramble(x)
    return x ^ (x >> 16)


@jit
def noise(at: tl.tensor, first: tl.tensor, step: tl.tensor) -> tl.tensor:
    """Noise words (uint32) of mains, for the elements with index `first` (int64) + `at` (int32) at `step` (int32)."""
    golden = tl.full((), 0x9E3779B9, tl.uint32)
    base = first.to(tl.uint32)
    upper = (first >> 32).to(tl.uint32)
    count = step.to(tl.uint32, bitcast=True)
    lower = base + at.to(tl.uint32)
    # A run may cross one multiple of 2^32. Computing both scalar keys is cheaper than a key per element.
    key = tl.where(lower < base, mix(count + (upper + 1) * golden), mix(count + upper * golden))
    return scramble(lower ^ key)


@jit
def noise_of_state(
    at: tl.tensor, first: tl.tensor, step: tl.tensor, STATE: tl.constexpr, PERIOD: tl.constexpr
) -> tl.tensor:
    """Noise words (uint32) of a state, counted from 1, as `noise` has them for mains. PERIOD is a power of two."""
    place = (first & 127).to(tl.int32) + at
    stream = step.to(tl.uint32, bitcast=True) + STATE * tl.full((), 0x632BE5AB, tl.uint32)
    hashed = noise(place >> 7, first >> 7, stream)
    return hashed ^ ((place & (PERIOD - 1)).to(tl.uint32) * tl.full((), 0x9E3779B9, tl.uint32))


@jit
def round_stochastically(x: tl.tensor, words: tl.tensor) -> tl.tensor:
    """Round `x` (float32) to one of its two bfloat16 neighbours. Infinities and NaN are unchanged."""
    word = x.to(tl.uint32, bitcast=True)
    rounded = ((word + (words >> 16)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where((word & 0x7F800000) != 0x7F800000, rounded, nearest(x, tl.bfloat16))
