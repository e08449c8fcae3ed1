"""SGD, with momentum or without, as one Triton sweep over the chunk table.

Bytes per element: 20 with float32 momentum, 12 without, 14 with bf16 gradients and momentum beside a remainder.
`kernels/sgd.md` derives the design.
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
def sgd_tile(
    main: tl.tensor, out: tl.tensor, grad: tl.tensor, buffer: tl.tensor, buffer_scale: tl.tensor,
    row: tl.tensor, start: tl.tensor, n: tl.tensor, first: tl.tensor, fresh: tl.tensor,
    MAIN: tl.constexpr, OUT: tl.constexpr, BUFFER: tl.constexpr, SCHEME: tl.constexpr, NESTEROV: tl.constexpr,
    REMAINDER: tl.constexpr, IEEE: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
) -> None:  # fmt: skip
    """Updates BLOCK elements of one chunk, from `start` on; `fresh` is 1 - dampening."""
    at = start + tl.arange(0, BLOCK)
    p = read_main(main, out, at, n, REMAINDER, FULL)
    g = load(grad, at, n, FULL).to(tl.float32) * tl.load(row + scalars.GRAD_SCALE)
    g = decayed(g, tl.load(row + scalars.WEIGHT_DECAY), p)
    if BUFFER is not None:
        momentum = tl.load(row + scalars.MOMENTUM)
        # At momentum zero the buffer rests: it must not even be rounded again.
        if momentum != 0.0:
            step = tl.load(row + scalars.STEP).to(tl.int32, bitcast=True)
            b = read_state(buffer, buffer_scale, start, n, BLOCK, SCHEME, True, IEEE, FULL)
            b = tl.where(step == 1, g, momentum * b + fresh * g)
            g = g + momentum * b if NESTEROV else b
            write_state(buffer, buffer_scale, b, start, n, BUFFER, BLOCK, SCHEME, True, IEEE, FULL)
    p -= tl.load(row + scalars.LR) * g
    write_main(main, out, p, at, n, first, 0, MAIN, OUT, REMAINDER, False, FULL)


@jit
def sgd_sweep(
    records: tl.tensor,  # (chunks, WIDTH) int64: main or remainder, out, buffer, its scales ... n, row, first
    grads: tl.tensor,  # (chunks,) int64
    block: tl.tensor,  # (rows, 16) float32
    fresh: float,  # 1 - dampening
    GRAD: tl.constexpr, MAIN: tl.constexpr, OUT: tl.constexpr, BUFFER: tl.constexpr, SCHEME: tl.constexpr,
    NESTEROV: tl.constexpr, REMAINDER: tl.constexpr, IEEE: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, E: tl.constexpr,
) -> None:  # fmt: skip
    """One program per chunk; writes nothing at all where the scalar block says not to proceed."""
    chunk = tl.program_id(0)
    record = records + chunk * WIDTH
    main = pointer(tl.load(record + 0), MAIN, E)
    out = pointer(tl.load(record + 1), tl.int16 if REMAINDER else (MAIN if OUT is None else OUT), E)
    buffer = pointer(tl.load(record + 2), tl.float32 if BUFFER is None else BUFFER, E)
    buffer_scale = pointer(tl.load(record + 3), tl.float32, 1)
    grad = pointer(tl.load(grads + chunk), GRAD, E)
    row = block + tl.load(record + WIDTH - 2) * scalars.WIDTH
    first = tl.load(record + WIDTH - 1)
    n = tl.where(tl.load(row + scalars.PROCEED) != 0.0, tl.load(record + WIDTH - 3), 0).to(tl.int32)
    if n == CHUNK:
        for start in range(0, CHUNK, BLOCK):
            sgd_tile(main, out, grad, buffer, buffer_scale, row, start, n, first, fresh,
                     MAIN, OUT, BUFFER, SCHEME, NESTEROV, REMAINDER, IEEE, BLOCK, True)  # fmt: skip
    else:
        for start in range(0, n, BLOCK):
            sgd_tile(main, out, grad, buffer, buffer_scale, row, start, n, first, fresh,
                     MAIN, OUT, BUFFER, SCHEME, NESTEROV, REMAINDER, IEEE, BLOCK, False)  # fmt: skip


def sgd_(
    batches: Sequence[Batch],
    *,
    nesterov: bool,
    dampening: float,
    momentum_buffer_codec: StateCodec | None,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
) -> None:
    """What `reference.sgd_` does, on the device of the tensors; the host waits for nothing and may be capturing.

    Raises LayoutError for a dtype that Triton cannot sweep, FrozenHyperError for host numbers in a capture.
    """
    codec = momentum_buffer_codec

    def options(formats: Formats) -> dict[str, Any]:
        return {
            "fresh": 1.0 - dampening,
            "BUFFER": None if codec is None else triton_dtype(formats.states[0]),
            "SCHEME": "plain" if codec is None else scheme(codec),
            "NESTEROV": nesterov,
        }

    codecs = {} if codec is None else {"momentum_buffer": codec}
    launch(sgd_sweep, batches, codecs, options, grad_scale=grad_scale, skip=skip)
