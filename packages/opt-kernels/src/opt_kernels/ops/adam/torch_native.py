"""Adam with torch's own fused sweep: over whole tensors where every dtype agrees, over cache tiles where not."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opt_kernels.codecs import StateCodec
from opt_kernels.ops.adam.reference import Order, updated
from opt_kernels.ops.elements import HostHyper, on_host, skipped
from opt_kernels.ops.tiles import divided, tiles
from opt_kernels.rules.base import Batch


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
    """What `reference.adam_` does, but for the last bits. Hyper-parameters are read on the host."""
    if skipped(skip):
        return
    codecs = {"exp_avg": exp_avg_codec, "exp_avg_sq": exp_avg_sq_codec}
    is_fused = order == "torch"
    update_ = _fused_ if is_fused else _eager_
    for hyper, works in batches:
        row = on_host(hyper)
        whole, cut = divided(works, codecs, scale=float(grad_scale))
        if not is_fused:  # its operations make new tensors, which must not be whole ones
            whole, cut = [], [*whole, *cut]
        if whole:
            mains = [run.main for run in whole if run.main is not None]
            exp_avgs = [run.state["exp_avg"] for run in whole]
            exp_avg_sqs = [run.state["exp_avg_sq"] for run in whole]
            update_(mains, [run.grad for run in whole], exp_avgs, exp_avg_sqs, row, decoupled=decoupled)
        stochastic_step = int(row.step) if stochastic_rounding else None
        for tile in tiles(cut, codecs, scale=float(grad_scale), stochastic_step=stochastic_step, flat_grads=is_fused):
            m, v = tile.states["exp_avg"], tile.states["exp_avg_sq"]
            update_(tile.mains, tile.grads, m, v, row, decoupled=decoupled)


def _fused_(
    mains: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    row: HostHyper,
    *,
    decoupled: bool,
) -> None:
    sweep = torch._fused_adamw_ if decoupled else torch._fused_adam_
    step = torch.full((), row.step, dtype=torch.float32, device=mains[0].device)
    sweep(
        mains,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [step] * len(mains),
        lr=row.lr,
        beta1=row.betas[0],
        beta2=row.betas[1],
        weight_decay=row.weight_decay,
        eps=row.eps,
        amsgrad=False,
        maximize=False,
    )


def _eager_(
    mains: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    row: HostHyper,
    *,
    decoupled: bool,
) -> None:
    for p, g, m, v in zip(mains, grads, exp_avgs, exp_avg_sqs):
        p.copy_(updated(p, g, m, v, row, decoupled=decoupled, order="te"))
