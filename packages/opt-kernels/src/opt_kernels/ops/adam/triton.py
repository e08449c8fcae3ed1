"""Adam as one Triton sweep over the chunk table: all between reading a gradient and writing a weight, in registers.

Bytes per element (read + written once, nothing else): 28 in float32, 30 with a 16-bit copy of the weight, 28 with bf16
weights and remainders, 18 with bf16 gradients and moments beside them. `kernels/adam.md` derives the design.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from opt_kernels.codecs import StateCodec
from opt_kernels.jit import jit, tl
from opt_kernels.ops import scalars
from opt_kernels.ops.adam.reference import Order
from opt_kernels.ops.formats import Formats, rounds_by_chance, triton_dtype
from opt_kernels.ops.lanes import decayed, divide, load, pointer, root
from opt_kernels.ops.quantize.triton import read_state, scheme, write_state
from opt_kernels.ops.storage import read_main, write_main
from opt_kernels.ops.sweep import launch
from opt_kernels.rules.base import Batch


@jit
def stepped(
    p: tl.tensor, m: tl.tensor, v: tl.tensor, row: tl.tensor,
    DECOUPLED: tl.constexpr, TE: tl.constexpr, IEEE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The new mains, from the new moments; the two orders of operations of `reference.py`."""
    eps = tl.load(row + scalars.EPS)
    if TE:
        m_hat = divide(m, tl.load(row + scalars.CORRECTION1), IEEE)
        v_hat = divide(v, tl.load(row + scalars.CORRECTION2), IEEE)
        update = divide(m_hat, root(v_hat, IEEE) + eps, IEEE)
        if DECOUPLED:
            update = decayed(update, tl.load(row + scalars.WEIGHT_DECAY), p)
        return p - tl.load(row + scalars.LR) * update
    else:
        if DECOUPLED:
            p = decayed(p, -tl.load(row + scalars.LR_DECAY), p)
        denominator = divide(root(v, IEEE), tl.load(row + scalars.ROOT_CORRECTION2), IEEE) + eps
        return p - divide(tl.load(row + scalars.STEP_SIZE) * m, denominator, IEEE)


@jit
def adam_tile(
    main: tl.tensor, out: tl.tensor, grad: tl.tensor, exp_avg: tl.tensor, exp_avg_sq: tl.tensor,
    exp_avg_scale: tl.tensor, exp_avg_sq_scale: tl.tensor,
    row: tl.tensor, start: tl.tensor, n: tl.tensor, first: tl.tensor,
    MAIN: tl.constexpr, OUT: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr,
    SCHEME: tl.constexpr, SCHEME_SQ: tl.constexpr, REMAINDER: tl.constexpr, BY_CHANCE: tl.constexpr,
    DECOUPLED: tl.constexpr, TE: tl.constexpr, IEEE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
) -> None:  # fmt: skip
    """Updates BLOCK elements of one chunk, from `start` on."""
    at = start + tl.arange(0, BLOCK)
    p = read_main(main, out, at, n, REMAINDER, FULL)
    g = load(grad, at, n, FULL).to(tl.float32) * tl.load(row + scalars.GRAD_SCALE)
    m = read_state(exp_avg, exp_avg_scale, start, n, BLOCK, SCHEME, True, IEEE, FULL)
    v = read_state(exp_avg_sq, exp_avg_sq_scale, start, n, BLOCK, SCHEME_SQ, False, IEEE, FULL)
    if not DECOUPLED:
        g = decayed(g, tl.load(row + scalars.WEIGHT_DECAY), p)
    m += tl.load(row + scalars.ONE_MINUS_BETA1) * (g - m)
    v = tl.load(row + scalars.BETA2) * v + tl.load(row + scalars.ONE_MINUS_BETA2) * g * g
    p = stepped(p, m, v, row, DECOUPLED, TE, IEEE)
    step = tl.load(row + scalars.STEP).to(tl.int32, bitcast=True)
    write_main(main, out, p, at, n, first, step, MAIN, OUT, REMAINDER, BY_CHANCE, FULL)
    write_state(exp_avg, exp_avg_scale, m, start, n, EXP_AVG, BLOCK, SCHEME, True, IEEE, FULL)
    write_state(exp_avg_sq, exp_avg_sq_scale, v, start, n, EXP_AVG_SQ, BLOCK, SCHEME_SQ, False, IEEE, FULL)


@jit
def adam_sweep(
    records: tl.tensor,  # (chunks, WIDTH) int64: main or remainder, out, moments, their scales ... n, row, first
    grads: tl.tensor,  # (chunks,) int64
    block: tl.tensor,  # (rows, 16) float32
    GRAD: tl.constexpr, MAIN: tl.constexpr, OUT: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr,
    SCHEME: tl.constexpr, SCHEME_SQ: tl.constexpr, REMAINDER: tl.constexpr, BY_CHANCE: tl.constexpr,
    DECOUPLED: tl.constexpr, TE: tl.constexpr, IEEE: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr,
) -> None:  # fmt: skip
    """One program per chunk; writes nothing at all where the scalar block says not to proceed."""
    chunk = tl.program_id(0)
    record = records + chunk * WIDTH
    main = pointer(tl.load(record + 0), MAIN, E)
    out = pointer(tl.load(record + 1), tl.int16 if REMAINDER else (MAIN if OUT is None else OUT), E)
    exp_avg = pointer(tl.load(record + 2), EXP_AVG, E)
    exp_avg_sq = pointer(tl.load(record + 3), EXP_AVG_SQ, E)
    exp_avg_scale = pointer(tl.load(record + 4), tl.float32, 1)
    exp_avg_sq_scale = pointer(tl.load(record + (4 if SCHEME == "plain" else 5)), tl.float32, 1)
    grad = pointer(tl.load(grads + chunk), GRAD, E)
    row = block + tl.load(record + WIDTH - 2) * scalars.WIDTH
    first = tl.load(record + WIDTH - 1)
    n = tl.where(tl.load(row + scalars.PROCEED) != 0.0, tl.load(record + WIDTH - 3), 0).to(tl.int32)
    if n == CHUNK:
        for start in range(0, CHUNK, BLOCK):
            adam_tile(
                main, out, grad, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, row, start, n, first,
                MAIN, OUT, EXP_AVG, EXP_AVG_SQ, SCHEME, SCHEME_SQ, REMAINDER, BY_CHANCE,
                DECOUPLED, TE, IEEE, BLOCK, True,
            )  # fmt: skip
    else:
        for start in range(0, n, BLOCK):
            adam_tile(
                main, out, grad, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, row, start, n, first,
                MAIN, OUT, EXP_AVG, EXP_AVG_SQ, SCHEME, SCHEME_SQ, REMAINDER, BY_CHANCE,
                DECOUPLED, TE, IEEE, BLOCK, False,
            )  # fmt: skip


def adam_(
    batches: Sequence[Batch],
    *,
    decoupled: bool,
    order: Order,
    exp_avg_codec: StateCodec,
    exp_avg_sq_codec: StateCodec,
    stochastic_rounding: bool = False,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
) -> None:
    """What `reference.adam_` does, on the device of the tensors; the host waits for nothing and may be capturing.

    Raises LayoutError for a dtype that Triton cannot sweep, FrozenHyperError for host numbers in a capture.
    """

    def options(formats: Formats) -> dict[str, Any]:
        return {
            "EXP_AVG": triton_dtype(formats.states[0]),
            "EXP_AVG_SQ": triton_dtype(formats.states[1]),
            "SCHEME": scheme(exp_avg_codec),
            "SCHEME_SQ": scheme(exp_avg_sq_codec),
            "BY_CHANCE": rounds_by_chance(formats, stochastic_rounding),
            "DECOUPLED": decoupled,
            "TE": order == "te",
        }

    codecs = {"exp_avg": exp_avg_codec, "exp_avg_sq": exp_avg_sq_codec}
    launch(adam_sweep, batches, codecs, options, grad_scale=grad_scale, skip=skip)
