"""Lion in cache tiles: four passes of torch's operations over a tile, one trip to memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opt_kernels.codecs import StateCodec
from opt_kernels.ops.elements import HostHyper, on_host, run_of, skipped
from opt_kernels.ops.tiles import Scratch, Tile, tiles
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
    scratch = Scratch()
    for hyper, works in batches:
        row = on_host(hyper)
        for tile in tiles(map(run_of, works), {"exp_avg": exp_avg_codec}, scale=float(grad_scale)):
            _update_(tile, row, scratch)


def _update_(tile: Tile, row: HostHyper, scratch: Scratch) -> None:
    m = tile.state["exp_avg"]
    beta1, beta2 = row.betas
    u = torch.lerp(m, tile.grad, 1 - beta1, out=scratch.row("sign", m.dtype, like=m)).sign_()
    m.lerp_(tile.grad, 1 - beta2)
    tile.main.mul_(1 - row.lr * row.weight_decay).add_(u, alpha=-row.lr)
