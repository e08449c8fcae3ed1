"""Adam in one C++ pass over memory, for any mix of float32, bfloat16 and remainders; other formats go to torch."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from opt_kernels.codecs import StateCodec
from opt_kernels.cpp.sweep import update_
from opt_kernels.ops.adam import torch_native
from opt_kernels.ops.adam.reference import Order
from opt_kernels.ops.elements import HostHyper, skipped
from opt_kernels.rules.base import Batch

SOURCE = Path(__file__).with_name("adam.cpp")


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
    """What `reference.adam_` does, but for the last bits: the operations are torch's fused AdamW's, in its order."""
    if skipped(skip):
        return
    others = update_(
        batches,
        SOURCE,
        {"exp_avg": exp_avg_codec, "exp_avg_sq": exp_avg_sq_codec},
        partial(_row, decoupled=decoupled, order=order, grad_scale=float(grad_scale)),
        rounds_by_chance=stochastic_rounding,
        DECOUPLED=int(decoupled),
        TE_ORDER=int(order == "te"),
    )
    if others:
        torch_native.adam_(
            others,
            decoupled=decoupled,
            order=order,
            exp_avg_codec=exp_avg_codec,
            exp_avg_sq_codec=exp_avg_sq_codec,
            stochastic_rounding=stochastic_rounding,
            grad_scale=grad_scale,
        )


def _row(row: HostHyper, *, decoupled: bool, order: Order, grad_scale: float) -> tuple[float, ...]:
    """`struct Row` of adam.cpp."""
    beta1, beta2 = row.betas
    correction1, correction2 = 1 - math.pow(beta1, row.step), 1 - math.pow(beta2, row.step)
    is_torch = order == "torch"
    return (
        grad_scale,
        1 - row.lr * row.weight_decay if decoupled and is_torch else row.weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        correction1,
        math.sqrt(correction2) if is_torch else correction2,
        row.lr / correction1 if is_torch else row.lr,
        row.eps,
    )
