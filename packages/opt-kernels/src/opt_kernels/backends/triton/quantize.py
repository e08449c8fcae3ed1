"""Reading and writing a state as its codec keeps it, inside a sweep; the formulas stand in `opt_kernels.codecs.codec`.

A codec is named by its scheme: "plain" (the values), "half" and "e4m3" (`Scaled`), "companded", "root". e4m3 codes are
bytes put together from the float32's bits: Triton's own cast exists on some architectures only, and on one of them
means another format of the same width.
"""

import torch

from opt_kernels.backends.elements import LayoutError
from opt_kernels.backends.triton.jit import jit, tl
from opt_kernels.backends.triton.lanes import divide, load, nearest, root, store
from opt_kernels.codecs import Companded, Plain, Root, Scaled, StateCodec

GROUP: tl.constexpr = tl.constexpr(128)  # elements that share a scale
TINY: tl.constexpr = tl.constexpr(2.0**-126)  # the smallest scale: below it a scale could not be divided by


def scheme(codec: StateCodec) -> str:
    """The name by which a sweep is compiled for `codec`. Raises LayoutError for one that no sweep knows."""
    match codec:
        case Plain():
            return "plain"
        case Scaled(dtype=torch.float16, block=GROUP.value, exponent=15):
            return "half"
        case Scaled(dtype=torch.float8_e4m3fn, block=GROUP.value, exponent=8):
            return "e4m3"
        case Companded(block=GROUP.value):
            return "companded"
        case Root(block=GROUP.value):
            return "root"
    raise LayoutError(
        f"the triton backend has no sweep for {codec!r}; allowed are the codecs that codec_for gives, "
        f"with blocks of {GROUP.value}; use backend='torch'"
    )


@jit
def read_state(
    codes: tl.tensor,  # pointer
    scales: tl.tensor,  # pointer to float32; read where the scheme has scales
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
            y = divide(stored.to(tl.float32), 127.0, IEEE)
            return divide(y, 2.0 - tl.abs(y), IEEE) * scale
        elif SCHEME == "root":
            y = divide(stored.to(tl.float32), 255.0, IEEE) * scale
            return y * y
        else:
            y = (from_e4m3(stored) if SCHEME == "e4m3" else stored.to(tl.float32)) * scale
            return y if SIGNED else y * y


@jit
def write_state(
    codes: tl.tensor,  # pointer
    scales: tl.tensor,  # pointer to float32; written where the scheme has scales
    x: tl.tensor,  # (BLOCK,) float32; zero behind the end of the run
    start: tl.tensor,
    n: tl.tensor,
    DTYPE: tl.constexpr,  # of the codes
    BLOCK: tl.constexpr,
    SCHEME: tl.constexpr,
    SIGNED: tl.constexpr,
    IEEE: tl.constexpr,
    FULL: tl.constexpr,
) -> None:
    """Writes the state of one tile, and the scales of its groups."""
    at = start + tl.arange(0, BLOCK)
    if SCHEME == "plain":
        store(codes, at, n, nearest(x, DTYPE), FULL)
    else:
        if not SIGNED:
            x = root(x, IEEE)
        largest = largest_of_groups(x, BLOCK)
        scale = scale_of(largest, SCHEME)
        group = start // GROUP + tl.arange(0, BLOCK // GROUP)
        store(scales, group, (n + GROUP - 1) // GROUP, scale, FULL)
        store(codes, at, n, code(x, scale, BLOCK, SCHEME, SIGNED, IEEE), FULL)


@jit
def code(
    x: tl.tensor, scale: tl.tensor, BLOCK: tl.constexpr, SCHEME: tl.constexpr, SIGNED: tl.constexpr, IEEE: tl.constexpr
) -> tl.tensor:
    """The codes of a tile under the scales of its groups; zero where the scale is NaN."""
    if SCHEME == "half" or SCHEME == "e4m3":
        # Powers of two: the reciprocal is exact, and made from the exponent, 254 less the scale's own.
        word = scale.to(tl.int32, bitcast=True)
        inverse = tl.where(scale > 0.0, (254 << 23) - word, 0).to(tl.float32, bitcast=True)
        y = tl.where(spread(scale, BLOCK) >= 0.0, x * spread(inverse, BLOCK), 0.0)
        if not SIGNED:
            smallest = 0.001953125 if SCHEME == "e4m3" else 5.960464477539063e-08  # 2^-9, 2^-24
            y = tl.where(x > 0.0, tl.maximum(y, smallest), y)
        return to_e4m3(y) if SCHEME == "e4m3" else y.to(tl.float16)
    else:
        divisor = spread(tl.where(scale == 0.0, 1.0, scale), BLOCK)
        y = divide(x, divisor, IEEE)
        y = tl.where(y == y, y, 0.0)
        if SCHEME == "companded":
            y = divide(y, tl.abs(y) + 1.0, IEEE) * 254.0
            return tl.floor(y + 0.5).to(tl.int8)
        else:
            y = tl.floor(y * 255.0 + 0.5)
            return tl.where(x > 0.0, tl.maximum(y, 1.0), y).to(tl.uint8)


@jit
def largest_of_groups(x: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """max |x| of each group, (BLOCK / 128,) float32; infinite where a value is not finite."""
    # A maximum may or may not pass NaN on, by architecture; infinity it always does.
    size = tl.where(x == x, tl.abs(x), float("inf"))
    return tl.max(tl.reshape(size, (BLOCK // GROUP, GROUP)), axis=1)


@jit
def scale_of(largest: tl.tensor, SCHEME: tl.constexpr) -> tl.tensor:
    """The scale of a group whose largest value has this size: 0 for 0, NaN for what is not finite."""
    if SCHEME == "half" or SCHEME == "e4m3":
        exponent = 15 if SCHEME == "half" else 8
        biased = (largest.to(tl.int32, bitcast=True) >> 23) + (1 - exponent)
        scale = (tl.maximum(biased, 1) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.maximum(largest, TINY)
    return tl.where(largest > 0.0, tl.where(largest < float("inf"), scale, float("nan")), 0.0)


@jit
def spread(of_groups: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """One number per group as one per element, (BLOCK,)."""
    wide = tl.broadcast_to(tl.expand_dims(of_groups, 1), (BLOCK // GROUP, GROUP))
    return tl.reshape(wide, (BLOCK,))


@jit
def to_e4m3(y: tl.tensor) -> tl.tensor:
    """float32 below 2^8 in size as e4m3 bytes, to nearest, ties to even."""
    word = y.to(tl.uint32, bitcast=True)
    size = word & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # 2^14 has units in the last place of 2^-9, the step of e4m3's subnormals: the sum rounds as they must.
    small = (tl.abs(y) + 16384.0).to(tl.uint32, bitcast=True) & 0xF
    magnitude = tl.where(tl.abs(y) < 0.015625, small, normal)
    return (((word >> 24) & 0x80) | magnitude).to(tl.uint8)


@jit
def from_e4m3(codes: tl.tensor) -> tl.tensor:
    """e4m3 bytes as float32; exact, subnormals included."""
    word = codes.to(tl.uint32)
    size = ((word & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120, between the two biases
    return tl.where((word & 0x80) != 0, -size, size)
