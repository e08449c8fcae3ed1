"""SGD in one C++ pass over memory, for any mix of float32, bfloat16 and remainders; other formats go to torch."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from opt_kernels.codecs import StateCodec
from opt_kernels.cpp.sweep import update_
from opt_kernels.ops.elements import HostHyper, skipped
from opt_kernels.ops.sgd import torch_native
from opt_kernels.rules.base import Batch

SOURCE = Path(__file__).with_name("sgd.cpp")


def sgd_(
    batches: Sequence[Batch],
    *,
    nesterov: bool,
    dampening: float,
    momentum_buffer_codec: StateCodec | None,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
) -> None:
    """What `reference.sgd_` does, but for the last bits."""
    if skipped(skip):
        return
    others = []
    for with_buffer in (True, False):  # at momentum zero a buffer rests, whatever it is for other groups
        codecs = {"momentum_buffer": momentum_buffer_codec} if with_buffer and momentum_buffer_codec else {}
        others += update_(
            [batch for batch in batches if _has_buffer(batch, momentum_buffer_codec) is with_buffer],
            SOURCE,
            codecs,
            partial(_row, dampening=dampening, grad_scale=float(grad_scale)),
            NESTEROV=int(nesterov),
        )
    if others:
        torch_native.sgd_(
            others,
            nesterov=nesterov,
            dampening=dampening,
            momentum_buffer_codec=momentum_buffer_codec,
            grad_scale=grad_scale,
        )


def _has_buffer(batch: Batch, codec: StateCodec | None) -> bool:
    return codec is not None and batch.hyper.momentum != 0


def _row(row: HostHyper, *, dampening: float, grad_scale: float) -> tuple[float, ...]:
    """`struct Row` of sgd.cpp."""
    return (grad_scale, row.lr, row.weight_decay, row.momentum, 1 - dampening, float(row.step == 1))
