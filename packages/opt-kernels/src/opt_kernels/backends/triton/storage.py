"""Reading mains into float32 registers and writing them back in their storage dtype, inside a Triton sweep."""

from opt_kernels.backends.triton.jit import jit, tl
from opt_kernels.backends.triton.lanes import load, nearest, store
from opt_kernels.backends.triton.remainder import join, lower_half, upper_half
from opt_kernels.backends.triton.rounding import round_stochastically


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
    if REMAINDER:
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
    MAIN: tl.constexpr,  # dtype of the main
    OUT: tl.constexpr,  # dtype of the out, or None
    REMAINDER: tl.constexpr,
    STOCHASTIC_ROUNDING: tl.constexpr,  # whether a bfloat16 main is rounded stochastically
    FULL: tl.constexpr,
) -> None:
    """Write the mains and their rounded copy, or both halves."""
    if REMAINDER:
        store(out, at, n, upper_half(p), FULL)
        store(main, at, n, lower_half(p), FULL)
    else:
        if STOCHASTIC_ROUNDING and tl.bfloat16 == MAIN:
            store(main, at, n, round_stochastically(p, at, first, step), FULL)
        else:
            store(main, at, n, nearest(p, MAIN), FULL)
        if OUT is not None:
            store(out, at, n, nearest(p, OUT), FULL)
