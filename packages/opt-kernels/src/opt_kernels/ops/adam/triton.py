"""Adam as one Triton sweep over the chunk table: all between reading a gradient and writing a weight, in registers.

Bytes per element (read + written once, nothing else): 28 in float32, 30 with a 16-bit copy of the weight, 28 with bf16
weights and remainders, 18 with bf16 gradients and moments beside them. `kernels/adam.md` derives the design.
"""

from collections.abc import Sequence

from torch import Tensor

from opt_kernels.codecs import StateCodec
from opt_kernels.jit import jit, tl
from opt_kernels.ops import scalars
from opt_kernels.ops.adam.reference import Order
from opt_kernels.ops.lanes import divide, load, nearest, pointer, root, store
from opt_kernels.ops.storage import read_main, write_main
from opt_kernels.ops.sweep import BLOCK, NUM_WARPS, sweeps, triton_dtype
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
            update += tl.load(row + scalars.WEIGHT_DECAY) * p
        return p - tl.load(row + scalars.LR) * update
    else:
        if DECOUPLED:
            p -= tl.load(row + scalars.LR_DECAY) * p
        denominator = divide(root(v, IEEE), tl.load(row + scalars.ROOT_CORRECTION2), IEEE) + eps
        return p - divide(tl.load(row + scalars.STEP_SIZE) * m, denominator, IEEE)


@jit
def adam_tile(
    main: tl.tensor, out: tl.tensor, grad: tl.tensor, exp_avg: tl.tensor, exp_avg_sq: tl.tensor,
    row: tl.tensor, at: tl.tensor, n: tl.tensor,
    MAIN: tl.constexpr, OUT: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr,
    REMAINDER: tl.constexpr, DECOUPLED: tl.constexpr, TE: tl.constexpr, IEEE: tl.constexpr, FULL: tl.constexpr,
) -> None:  # fmt: skip
    """Updates the elements `at` of one chunk."""
    p = read_main(main, out, at, n, REMAINDER, FULL)
    g = load(grad, at, n, FULL).to(tl.float32) * tl.load(row + scalars.GRAD_SCALE)
    m = load(exp_avg, at, n, FULL).to(tl.float32)
    v = load(exp_avg_sq, at, n, FULL).to(tl.float32)
    if not DECOUPLED:
        g += tl.load(row + scalars.WEIGHT_DECAY) * p
    m += tl.load(row + scalars.ONE_MINUS_BETA1) * (g - m)
    v = tl.load(row + scalars.BETA2) * v + tl.load(row + scalars.ONE_MINUS_BETA2) * g * g
    p = stepped(p, m, v, row, DECOUPLED, TE, IEEE)
    write_main(main, out, p, at, n, MAIN, OUT, REMAINDER, FULL)
    store(exp_avg, at, n, nearest(m, EXP_AVG), FULL)
    store(exp_avg_sq, at, n, nearest(v, EXP_AVG_SQ), FULL)


@jit
def adam_sweep(
    records: tl.tensor,  # (chunks, WIDTH) int64: main or remainder, out, exp_avg, exp_avg_sq ... n, row, first
    grads: tl.tensor,  # (chunks,) int64
    block: tl.tensor,  # (rows, 16) float32
    GRAD: tl.constexpr, MAIN: tl.constexpr, OUT: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr,
    REMAINDER: tl.constexpr, DECOUPLED: tl.constexpr, TE: tl.constexpr, IEEE: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr,
) -> None:  # fmt: skip
    """One program per chunk; writes nothing at all where the scalar block says not to proceed."""
    chunk = tl.program_id(0)
    record = records + chunk * WIDTH
    main = pointer(tl.load(record + 0), MAIN, E)
    out = pointer(tl.load(record + 1), tl.int16 if REMAINDER else (MAIN if OUT is None else OUT), E)
    exp_avg = pointer(tl.load(record + 2), EXP_AVG, E)
    exp_avg_sq = pointer(tl.load(record + 3), EXP_AVG_SQ, E)
    grad = pointer(tl.load(grads + chunk), GRAD, E)
    row = block + tl.load(record + WIDTH - 2) * scalars.WIDTH
    n = tl.where(tl.load(row + scalars.PROCEED) != 0.0, tl.load(record + WIDTH - 3), 0)
    lanes = tl.arange(0, BLOCK)
    if n == CHUNK:
        for start in range(0, CHUNK, BLOCK):
            adam_tile(main, out, grad, exp_avg, exp_avg_sq, row, start + lanes, n,
                      MAIN, OUT, EXP_AVG, EXP_AVG_SQ, REMAINDER, DECOUPLED, TE, IEEE, True)  # fmt: skip
    else:
        for start in range(0, n, BLOCK):
            adam_tile(main, out, grad, exp_avg, exp_avg_sq, row, start + lanes, n,
                      MAIN, OUT, EXP_AVG, EXP_AVG_SQ, REMAINDER, DECOUPLED, TE, IEEE, False)  # fmt: skip


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
    found = sweeps(batches, ("exp_avg", "exp_avg_sq"), {})
    if not found:
        return
    device = found[0].table.grads.device
    block = scalars.scalar_block([b.hyper for b in batches], grad_scale=grad_scale, skip=skip, device=device)
    for formats, table in found:
        adam_sweep[(table.num_chunks,)](
            table.records,
            table.grads,
            block,
            GRAD=triton_dtype(formats.grad),
            MAIN=tl.int16 if formats.main is None else triton_dtype(formats.main),
            OUT=None if formats.out is None else triton_dtype(formats.out),
            EXP_AVG=triton_dtype(formats.states[0]),
            EXP_AVG_SQ=triton_dtype(formats.states[1]),
            REMAINDER=formats.remainder,
            DECOUPLED=decoupled,
            TE=order == "te",
            IEEE=formats.ieee,
            WIDTH=table.records.shape[1],
            CHUNK=table.chunk,
            BLOCK=BLOCK,
            E=formats.vector,
            num_warps=NUM_WARPS,
            enable_fp_fusion=not formats.ieee,
        )
