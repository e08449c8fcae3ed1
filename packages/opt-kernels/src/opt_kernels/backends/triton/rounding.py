"""Stochastic rounding to bfloat16 as device functions, bit for bit as `opt_kernels.codecs.rounding`."""

from opt_kernels.backends.triton.jit import jit, tl
from opt_kernels.backends.triton.lanes import nearest


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
