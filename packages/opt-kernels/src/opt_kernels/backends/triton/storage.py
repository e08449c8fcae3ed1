"""Reading mains into float32 registers and writing them back in their storage dtype, inside a Triton sweep."""

from opt_kernels.backends.triton.jit import jit, tl
from opt_kernels.backends.triton.lanes import load, nearest, store
from opt_kernels.backends.triton.remainder import (
    join,
    join_short,
    lower_half,
    lower_short,
    rounded_short,
    upper_half,
    upper_short,
)
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
