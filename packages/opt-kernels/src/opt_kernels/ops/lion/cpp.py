"""Lion in one C++ pass over memory, for any mix of float32, bfloat16 and remainders; other formats go to torch."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from opt_kernels.codecs import StateCodec
from opt_kernels.cpp.sweep import update_
from opt_kernels.ops.elements import HostHyper, skipped
from opt_kernels.ops.lion import torch_native
from opt_kernels.rules.base import Batch

SOURCE = Path(__file__).with_name("lion.cpp")


def lion_(
    batches: Sequence[Batch],
    *,
    exp_avg_codec: StateCodec,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
) -> None:
    """What `reference.lion_` does, but for the last bits."""
    if skipped(skip):
        return
    others = update_(batches, SOURCE, {"exp_avg": exp_avg_codec}, partial(_row, grad_scale=float(grad_scale)))
    if others:
        torch_native.lion_(others, exp_avg_codec=exp_avg_codec, grad_scale=grad_scale)


def _row(row: HostHyper, *, grad_scale: float) -> tuple[float, ...]:
    """`struct Row` of lion.cpp."""
    beta1, beta2 = row.betas
    return (grad_scale, row.lr, 1 - row.lr * row.weight_decay, 1 - beta1, 1 - beta2)
