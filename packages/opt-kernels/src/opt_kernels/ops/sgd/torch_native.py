"""SGD with torch's own fused sweep: over whole tensors where every dtype agrees, over cache tiles where not."""

from collections.abc import Sequence

import torch
from torch import Tensor

from opt_kernels.codecs import StateCodec
from opt_kernels.ops.elements import HostHyper, on_host, skipped
from opt_kernels.ops.tiles import divided, tiles
from opt_kernels.rules.base import Batch


def sgd_(
    batches: Sequence[Batch],
    *,
    nesterov: bool,
    dampening: float,
    momentum_buffer_codec: StateCodec | None,
    grad_scale: float | Tensor = 1.0,
    skip: Tensor | None = None,
) -> None:
    """What `reference.sgd_` does, but for the last bits. Hyper-parameters are read on the host."""
    if skipped(skip):
        return
    codecs = {} if momentum_buffer_codec is None else {"momentum_buffer": momentum_buffer_codec}
    for hyper, works in batches:
        row = on_host(hyper)
        whole, cut = divided(works, codecs, scale=float(grad_scale))
        if whole:
            buffers = [run.state["momentum_buffer"] for run in whole if codecs]
            mains = [run.main for run in whole if run.main is not None]
            _fused_(mains, [run.grad for run in whole], buffers, row, nesterov=nesterov, dampening=dampening)
        for tile in tiles(cut, codecs, scale=float(grad_scale)):
            buffers = tile.states.get("momentum_buffer", [])
            _fused_(tile.mains, tile.grads, buffers, row, nesterov=nesterov, dampening=dampening)


def _fused_(
    mains: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],  # empty: plain descent
    row: HostHyper,
    *,
    nesterov: bool,
    dampening: float,
) -> None:
    momentum = row.momentum if buffers else 0.0
    torch._fused_sgd_(
        mains,
        grads,
        buffers if momentum else [],
        weight_decay=row.weight_decay,
        momentum=momentum,
        lr=row.lr,
        dampening=dampening,
        nesterov=nesterov and momentum != 0,
        maximize=False,
        is_first_step=row.step == 1,
    )
