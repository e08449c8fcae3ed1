"""Lion in cache tiles: four passes of torch's operations over a tile, one trip to memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opt_kernels.codecs import StateCodec
from opt_kernels.ops.elements import HostHyper, on_host, skipped
from opt_kernels.ops.lion.reference import sign_
from opt_kernels.ops.tiles import Tile, divided, tiles
from opt_kernels.rules.base import Batch


def lion_(
    batches: Sequence[Batch],
    *,
    exp_avg_codec: StateCodec,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
) -> None:
    """What `reference.lion_` does, but for the last bits. Hyper-parameters are read on the host."""
    if skipped(skip):
        return
    codecs = {"exp_avg": exp_avg_codec}
    for hyper, works in batches:
        row = on_host(hyper)
        whole, cut = divided(works, codecs, scale=float(grad_scale))
        for tile in tiles([*whole, *cut], codecs, scale=float(grad_scale)):
            _update_(tile, row)


def _update_(tile: Tile, row: HostHyper) -> None:
    moments = tile.states["exp_avg"]
    beta1, beta2 = row.betas
    updates = torch._foreach_lerp(moments, tile.grads, 1 - beta1)
    for update in updates:
        sign_(update)
    torch._foreach_lerp_(moments, tile.grads, 1 - beta2)
    # Plain descent along the signs: p <- p - lr * (u + wd * p) in one pass.
    torch._fused_sgd_(
        tile.mains,
        updates,
        [],
        weight_decay=row.weight_decay,
        momentum=0.0,
        lr=row.lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )
