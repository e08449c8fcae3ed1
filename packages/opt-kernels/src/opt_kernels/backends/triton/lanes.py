"""Device functions that all Triton sweeps share: aligned pointers, loads and stores of tiles, rounding, arithmetic."""

from opt_kernels.backends.triton.jit import INTERPRETED, jit, tl


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
    b, e = tl.cast(base, tl.float64), tl.cast(exponent, tl.float64)
    size = tl.where(e == 0.0, 1.0, tl.exp(e * tl.log(tl.abs(b))))
    is_odd = e - 2.0 * tl.floor(e * 0.5) == 1.0
    signed = tl.where(tl.floor(e) == e, tl.where(is_odd, -size, size), float("nan"))
    return tl.where(b < 0.0, signed, size).to(tl.float32)
