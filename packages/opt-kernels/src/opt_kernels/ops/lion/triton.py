"""Lion as one Triton sweep over the chunk table.

Bytes per element: 20 in float32, 14 with bf16 gradients and momentum beside a remainder, 12 with momentum codes of 8
bits. `kernels/lion.md` derives the design.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from opt_kernels.codecs import StateCodec
from opt_kernels.jit import jit, tl
from opt_kernels.ops import scalars
from opt_kernels.ops.formats import Formats, triton_dtype
from opt_kernels.ops.lanes import decayed, load, pointer
from opt_kernels.ops.quantize.triton import read_state, scheme, write_state
from opt_kernels.ops.storage import read_main, write_main
from opt_kernels.ops.sweep import launch
from opt_kernels.rules.base import Batch


@jit
def lion_tile(
    main: tl.tensor, out: tl.tensor, grad: tl.tensor, exp_avg: tl.tensor, exp_avg_scale: tl.tensor,
    row: tl.tensor, start: tl.tensor, n: tl.tensor, first: tl.tensor,
    MAIN: tl.constexpr, OUT: tl.constexpr, EXP_AVG: tl.constexpr, SCHEME: tl.constexpr,
    REMAINDER: tl.constexpr, IEEE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
) -> None:  # fmt: skip
    """Updates BLOCK elements of one chunk, from `start` on."""
    at = start + tl.arange(0, BLOCK)
    p = read_main(main, out, at, n, REMAINDER, FULL)
    g = load(grad, at, n, FULL).to(tl.float32) * tl.load(row + scalars.GRAD_SCALE)
    m = read_state(exp_avg, exp_avg_scale, start, n, BLOCK, SCHEME, True, IEEE, FULL)
    blend = tl.load(row + scalars.BETA1) * m + tl.load(row + scalars.ONE_MINUS_BETA1) * g
    # A sign by comparisons would make zero of NaN, and a diverged parameter would look like one at rest.
    u = tl.where(blend > 0.0, 1.0, tl.where(blend < 0.0, -1.0, blend))
    p -= tl.load(row + scalars.LR) * decayed(u, tl.load(row + scalars.WEIGHT_DECAY), p)
    write_main(main, out, p, at, n, first, 0, MAIN, OUT, REMAINDER, False, FULL)
    # Behind the write: p has left its registers by now, without which sm_80 runs out of them.
    m = tl.load(row + scalars.BETA2) * m + tl.load(row + scalars.ONE_MINUS_BETA2) * g
    write_state(exp_avg, exp_avg_scale, m, start, n, EXP_AVG, BLOCK, SCHEME, True, IEEE, FULL)


@jit
def lion_sweep(
    records: tl.tensor,  # (chunks, WIDTH) int64: main or remainder, out, exp_avg, its scales ... n, row, first
    grads: tl.tensor,  # (chunks,) int64
    block: tl.tensor,  # (rows, 16) float32
    GRAD: tl.constexpr, MAIN: tl.constexpr, OUT: tl.constexpr, EXP_AVG: tl.constexpr, SCHEME: tl.constexpr,
    REMAINDER: tl.constexpr, IEEE: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr,
) -> None:  # fmt: skip
    """One program per chunk; writes nothing at all where the scalar block says not to proceed."""
    chunk = tl.program_id(0)
    record = records + chunk * WIDTH
    main = pointer(tl.load(record + 0), MAIN, E)
    out = pointer(tl.load(record + 1), tl.int16 if REMAINDER else (MAIN if OUT is None else OUT), E)
    exp_avg = pointer(tl.load(record + 2), EXP_AVG, E)
    exp_avg_scale = pointer(tl.load(record + 3), tl.float32, 1)
    grad = pointer(tl.load(grads + chunk), GRAD, E)
    row = block + tl.load(record + WIDTH - 2) * scalars.WIDTH
    first = tl.load(record + WIDTH - 1)
    n = tl.where(tl.load(row + scalars.PROCEED) != 0.0, tl.load(record + WIDTH - 3), 0).to(tl.int32)
    if n == CHUNK:
        for start in range(0, CHUNK, BLOCK):
            lion_tile(main, out, grad, exp_avg, exp_avg_scale, row, start, n, first,
                      MAIN, OUT, EXP_AVG, SCHEME, REMAINDER, IEEE, BLOCK, True)  # fmt: skip
    else:
        for start in range(0, n, BLOCK):
            lion_tile(main, out, grad, exp_avg, exp_avg_scale, row, start, n, first,
                      MAIN, OUT, EXP_AVG, SCHEME, REMAINDER, IEEE, BLOCK, False)  # fmt: skip


def lion_(
    batches: Sequence[Batch],
    *,
    exp_avg_codec: StateCodec,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
) -> None:
    """What `reference.lion_` does, on the device of the tensors; the host waits for nothing and may be capturing.

    Raises LayoutError for a dtype that Triton cannot sweep, FrozenHyperError for host numbers in a capture.
    """

    def options(formats: Formats) -> dict[str, Any]:
        return {"EXP_AVG": triton_dtype(formats.states[0]), "SCHEME": scheme(exp_avg_codec)}

    launch(lion_sweep, batches, {"exp_avg": exp_avg_codec}, options, grad_scale=grad_scale, skip=skip)
