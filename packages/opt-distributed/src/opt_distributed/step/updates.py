"""The updates of a step: clip, then one pass for each unit, among which exchanges of matrices run ahead."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from opt_distributed.comm import device as devices
from opt_distributed.pieces.piece import Groups, Update
from opt_distributed.step.hooked import add_over_ranks_, means_over_ranks
from opt_distributed.step.unit import Unit
from opt_distributed.step.verdict import Limits, Prepared
from opt_distributed.step.watch import Spans


def update_units_(
    units: Sequence[Unit],
    prepared: Prepared,
    groups: Groups,
    *,
    limits: Limits,
    accelerator: devices.Device,
    device: torch.device,
    spans: Spans,
    then: Callable[[Unit], None] | None = None,
) -> None:
    """Clip, and update each unit; then call `then` with it. `device` is that of tensors that are sent between ranks.

    Collective where units sum over ranks what their hooks read, or exchange matrices.
    """
    verdict, ready, max_norm = prepared
    with spans("optimizer-clip-main-grad"):
        scales: Sequence[float | Tensor] = verdict.scales(max_norm, limits.clips)
    skip: Tensor | None = verdict.skip
    if not accelerator.is_asynchronous:
        scales = [float(scale) for scale in scales]
        skip = None
    on_host = None  # once for all units
    if any(unit.host is not None and unit.host.computes_on_host for unit in units):
        numbers = [torch.as_tensor(x, dtype=torch.float64, device=device) for x in (verdict.skip, *scales)]
        on_host = devices.HostCopy(torch.stack(numbers), accelerator)
    updates = [Update(unit_grads, groups, scales, skip, on_host) for unit_grads in ready]
    unit_updates = list(zip(units, updates, strict=True))
    # Collective: sums over ranks what hooks read of parameters that are cut. Without such hooks nothing is sent.
    means = means_over_ranks([(unit.cut_rows, update.ready) for unit, update in unit_updates], device=device)
    hooked = [unit.begin_(update, means) for unit, update in unit_updates]
    add_over_ranks_([(unit.cut, step) for unit, step in zip(units, hooked, strict=True)], device=device)
    running = []
    for (unit, update), step in zip(unit_updates, hooked, strict=True):
        running.append((unit, unit.updating_(update, step, sends=then is not None)))
    early = (updating for unit, updating in running if unit.starts_early)
    is_free = True  # one starts early at a time: three runs of matrices are in memory
    for unit, updating in running:
        with spans("optimizer-inner-step"):
            if is_free:
                next_early = next(early, None)
                if next_early is not None:
                    next(next_early, None)  # starts its first exchange
            for _ in updating:
                pass
        if then is not None:
            then(unit)
        is_free = unit.starts_early
