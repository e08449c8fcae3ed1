"""Stochastic rounding to bfloat16 as device functions: bit for bit what `reference.py` defines."""

from opt_kernels.backends.triton.jit import jit, tl
from opt_kernels.backends.triton.lanes import nearest


@jit
def mix(x: tl.tensor) -> tl.tensor:
    """A bijection of uint32 words, each of whose output bits depends on every input bit."""
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@jit
def noise(at: tl.tensor, first: tl.tensor, step: tl.tensor) -> tl.tensor:
    """Words 0 .. 65535 of the elements number `first` (int64) + `at` (int32) at `step` (int32)."""
    golden = tl.full((), 0x9E3779B9, tl.uint32)
    base = first.to(tl.uint32)
    upper = (first >> 32).to(tl.uint32)
    count = step.to(tl.uint32, bitcast=True)
    lower = base + at.to(tl.uint32)
    # A run may cross a multiple of 2^32; two keys of one number each are cheaper than a key for each element.
    key = tl.where(lower < base, mix(count + (upper + 1) * golden), mix(count + upper * golden))
    return mix(lower ^ key) >> 16


@jit
def round_stochastically(x: tl.tensor, at: tl.tensor, first: tl.tensor, step: tl.tensor) -> tl.tensor:
    """`x` (float32) as one of its two bfloat16 neighbours; infinities and NaN as they are."""
    word = x.to(tl.uint32, bitcast=True)
    rounded = ((word + noise(at, first, step)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where((word & 0x7F800000) != 0x7F800000, rounded, nearest(x, tl.bfloat16))
