"""Decoding and encoding states inside a sweep; the formulas are in `opt_kernels.codecs.codec`.

A codec is named by its scheme: "plain" (the values), "half", "e4m3" and "e5m2" (`Scaled`), "companded", "root". fp8
codes are computed from the bits of the float32, because Triton's casts exist only on some architectures, and on one of
them convert to a different format of the same width.
"""

import torch

from opt_kernels.backends.elements import LayoutError
from opt_kernels.backends.triton import jit, tl
from opt_kernels.backends.triton.lanes import divide, load, nearest, root, round_stochastically, store
from opt_kernels.codecs import StateCodec, scheme_of

GROUP: tl.constexpr = tl.constexpr(128)  # elements that share a scale
TINY: tl.constexpr = tl.constexpr(2.0**-126)  # the smallest scale: below it a scale could not be divided by
OUTLIER: tl.constexpr = tl.constexpr(2.0**60)
PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # dtypes of states without scales


def scheme(codec: StateCodec) -> str:
    """The scheme that a sweep is compiled with for `codec`. Raises LayoutError for an unsupported codec."""
    found = scheme_of(codec)
    if not found or (found == "plain" and codec.dtype not in PLAIN):
        raise LayoutError(
            f"the triton backend has no sweep for {codec!r}; allowed are the codecs that codec_for gives; "
            "use backend='torch'"
        )
    return found


@jit
def read_state(
    codes: tl.tensor,  # pointer
    scales: tl.tensor,  # pointer to float32; read if the scheme has scales
    start: tl.tensor,  # first element of the tile
    n: tl.tensor,
    BLOCK: tl.constexpr,
    SCHEME: tl.constexpr,
    SIGNED: tl.constexpr,
    IEEE: tl.constexpr,
    FULL: tl.constexpr,
) -> tl.tensor:
    """The state of one tile as float32."""
    stored = load(codes, start + tl.arange(0, BLOCK), n, FULL)
    if SCHEME == "plain":
        return stored.to(tl.float32)
    else:
        group = start // GROUP + tl.arange(0, BLOCK // GROUP)
        scale = spread(load(scales, group, (n + GROUP - 1) // GROUP, FULL), BLOCK)
        if SCHEME == "companded":
            y = stored.to(tl.float32)
            return divide(y, 254.0 - tl.abs(y), IEEE) * scale
        elif SCHEME == "root":
            y = stored.to(tl.float32) * scale
            return y * y
        else:
            y = (stored.to(tl.float32) if SCHEME == "half" else from_fp8(stored, SCHEME)) * scale
            return y if SIGNED else y * y


@jit
def no_outlier(x: tl.tensor, SCHEME: tl.constexpr, SIGNED: tl.constexpr) -> tl.tensor:
    """Return the mask of the values of a state below `StateCodec.outlier`; without scales, of all values."""
    if SCHEME == "plain":
        return tl.full(x.shape, True, tl.int1)
    else:
        return tl.abs(x) < (OUTLIER if SIGNED else OUTLIER * OUTLIER)


@jit
def write_state(
    codes: tl.tensor,  # pointer
    scales: tl.tensor,  # pointer to float32; written if the scheme has scales
    x: tl.tensor,  # (BLOCK,) float32
    words: tl.tensor,  # (BLOCK,) uint32: noise, to round stochastically; or None
    start: tl.tensor,
    n: tl.tensor,
    DTYPE: tl.constexpr,  # of the codes
    BLOCK: tl.constexpr,
    SCHEME: tl.constexpr,
    SIGNED: tl.constexpr,
    IEEE: tl.constexpr,
    FINITE: tl.constexpr,  # whether x is finite; else codes of a group are zero and its scale NaN
    FULL: tl.constexpr,
) -> None:
    """Write the state of one tile and the scales of its groups."""
    at = start + tl.arange(0, BLOCK)
    if SCHEME == "plain":
        store(codes, at, n, nearest(x, DTYPE) if words is None else round_stochastically(x, words), FULL)
    else:
        if not FULL:  # a formula may compute anything from the zeros beyond the end of the run
            x = tl.where(at < n, x, 0.0)
        if not SIGNED:
            x = root(x, IEEE)
        largest = largest_of_groups(x, BLOCK, FINITE)
        scale = scale_of(largest, SCHEME, IEEE, FINITE)
        group = start // GROUP + tl.arange(0, BLOCK // GROUP)
        store(scales, group, (n + GROUP - 1) // GROUP, scale, FULL)
        store(codes, at, n, code(x, words, scale, BLOCK, SCHEME, SIGNED, IEEE, FINITE), FULL)


@jit
def code(
    x: tl.tensor,
    words: tl.tensor,  # as in `write_state`
    scale: tl.tensor,
    BLOCK: tl.constexpr,
    SCHEME: tl.constexpr,
    SIGNED: tl.constexpr,
    IEEE: tl.constexpr,
    FINITE: tl.constexpr,
) -> tl.tensor:
    """The codes of a tile for the scales of its groups; zero if the scale is NaN."""
    if SCHEME == "half" or SCHEME == "e4m3" or SCHEME == "e5m2":
        # Powers of two: the reciprocal is exact, and its exponent bits are 254 minus those of the scale.
        word = scale.to(tl.int32, bitcast=True)
        inverse = tl.where(scale > 0.0, (254 << 23) - word, 0).to(tl.float32, bitcast=True)
        y = x * spread(inverse, BLOCK)
        if not FINITE:
            y = tl.where(spread(scale, BLOCK) >= 0.0, y, 0.0)
        if not SIGNED:
            # 2^-9, 2^-16, 2^-24
            smallest = (
                0.001953125 if SCHEME == "e4m3" else 1.52587890625e-05 if SCHEME == "e5m2" else 5.960464477539063e-08
            )
            y = tl.where(x > 0.0, tl.maximum(y, smallest), y)
        return to_narrow(y, words, SCHEME)
    else:
        if SCHEME == "companded":
            # Sums with a small scale would lose bits if they were halved, and those with a large one overflow if not.
            factor = tl.where(scale < 1.0, 1.0, 0.5)
            offset = tl.where(scale == 0.0, TINY, scale) * factor
            y = divide(x, tl.abs(x) * spread(factor, BLOCK) + spread(offset, BLOCK), IEEE)
            by = 254.0 * factor
        else:
            y = x
            by = divide(1.0, tl.where(scale == 0.0, 1.0, scale), IEEE)
        if not FINITE:
            y = tl.where(spread(scale, BLOCK) >= 0.0, y, 0.0)
            by = tl.where(scale >= 0.0, by, 0.0)
        if words is None:
            y *= spread(by, BLOCK)
        else:
            u = (words >> 18).to(tl.float32) * 6.103515625e-05 - 0.499969482421875  # 2^-14, 1/2 - 2^-15
            most: tl.constexpr = 127.0 if SCHEME == "companded" else 255.0
            y = tl.fma(y, spread(by, BLOCK), u)
            y = tl.minimum(tl.maximum(y, -most), most)  # an approximate division may lead to a code beyond
        if SCHEME == "root":
            y = tl.where(x > 0.0, tl.maximum(y, 1.0), y)
        # The sum's last bits are the integer nearest to y, ties to even.
        word = (y + 12582912.0).to(tl.int32, bitcast=True)
        return word.to(tl.int8) if SCHEME == "companded" else word.to(tl.uint8)


@jit
def largest_of_groups(x: tl.tensor, BLOCK: tl.constexpr, FINITE: tl.constexpr) -> tl.tensor:
    """max |x| of each group, (BLOCK / 128,) float32; infinite if a value is not finite."""
    # Whether a maximum propagates NaN depends on the architecture; it always propagates infinity.
    size = tl.abs(x)
    if not FINITE:
        size = tl.where(x == x, size, float("inf"))
    return tl.max(tl.reshape(size, (BLOCK // GROUP, GROUP)), axis=1)


@jit
def scale_of(largest: tl.tensor, SCHEME: tl.constexpr, IEEE: tl.constexpr, FINITE: tl.constexpr) -> tl.tensor:
    """The scale of a group from its largest magnitude: 0 for 0, NaN if it is not finite."""
    if SCHEME == "half" or SCHEME == "e4m3" or SCHEME == "e5m2":
        exponent = 8 if SCHEME == "e4m3" else 15
        biased = ((largest.to(tl.int32, bitcast=True) - 1) >> 23) + (1 - exponent)
        scale = (tl.maximum(biased, 1) << 23).to(tl.float32, bitcast=True)
    elif SCHEME == "root":
        scale = divide(largest, 255.0, IEEE)
    else:
        scale = tl.maximum(largest, TINY)
    if not FINITE:
        scale = tl.where(largest < float("inf"), scale, float("nan"))
    return tl.where(largest > 0.0, scale, 0.0)


@jit
def spread(per_group: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Repeat each group's number for all its elements: (BLOCK,)."""
    wide = tl.broadcast_to(tl.expand_dims(per_group, 1), (BLOCK // GROUP, GROUP))
    return tl.reshape(wide, (BLOCK,))


@jit
def to_narrow(y: tl.tensor, words: tl.tensor, SCHEME: tl.constexpr) -> tl.tensor:
    """Round float32 to float16, or to bytes of e4m3, of magnitude below 2^8, or e5m2, below 2^15: to nearest, ties to
    even, or by noise `words`."""
    if SCHEME == "half" and words is None:
        return y.to(tl.float16)
    shift: tl.constexpr = 20 if SCHEME == "e4m3" else 21 if SCHEME == "e5m2" else 13  # 23 minus the mantissa bits
    bias: tl.constexpr = 120 << 23 if SCHEME == "e4m3" else 112 << 23  # 127 minus the format's bias
    word = y.to(tl.uint32, bitcast=True)
    size = word & 0x7FFFFFFF
    smallest_normal = 0.015625 if SCHEME == "e4m3" else 6.103515625e-05  # 2^-6, 2^-14
    is_small = tl.abs(y) < smallest_normal
    if words is None:
        last_bit = (size >> shift) & 1  # of the mantissa that is kept: ties go to even
        normal = ((size + ((1 << (shift - 1)) - 1) + last_bit) >> shift) - (bias >> shift)
        # The ulp of this power of two equals the spacing of the format's subnormals, so the addition rounds correctly.
        power = 16384.0 if SCHEME == "e4m3" else 128.0
        magnitude = tl.where(is_small, (tl.abs(y) + power).to(tl.uint32, bitcast=True) & 0xF, normal)
    else:
        # The code with its fraction in the lower `shift` bits, plus noise.
        units = 536870912.0 if SCHEME == "e4m3" else 137438953472.0  # 2^29, 2^37
        small = (tl.minimum(tl.abs(y), smallest_normal) * units).to(tl.int32).to(tl.uint32)
        magnitude = (tl.where(is_small, small, size - bias) + (words >> (32 - shift))) >> shift
    if SCHEME == "half":
        return (((word >> 16) & 0x8000) | magnitude).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        return (((word >> 24) & 0x80) | magnitude).to(tl.uint8)


@jit
def from_fp8(codes: tl.tensor, SCHEME: tl.constexpr) -> tl.tensor:
    """Convert bytes of e4m3 or e5m2 to float32, exactly, subnormals included."""
    shift: tl.constexpr = 20 if SCHEME == "e4m3" else 21
    between = 1.329227995784916e36 if SCHEME == "e4m3" else 5.192296858534828e33  # 2^120, 2^112: ratio of the biases
    word = codes.to(tl.uint32)
    size = ((word & 0x7F) << shift).to(tl.float32, bitcast=True) * between
    return tl.where((word & 0x80) != 0, -size, size)
