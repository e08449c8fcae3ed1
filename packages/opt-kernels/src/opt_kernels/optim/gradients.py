"""The gradients of an optimizer: their factor and total norm, and whether a step only creates state."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_kernels.backends.dispatch import grad_stats
from opt_kernels.dtensor import are_dtensors, local
from opt_kernels.optim.param_rows import params_of

_GRAD, _DEVICE = attrgetter("grad"), attrgetter("device")


class Scaling(NamedTuple):
    """The factor of the gradients, and whether the step is skipped."""

    scale: float | Tensor  # 0-d float64
    skip: Tensor | None  # 0-d bool
    norm: Tensor | None = None  # 0-d float64, if gradients are clipped; infinite or NaN if any gradient is


def scaling_of(
    params: Sequence[Tensor], *, found_inf: Tensor | None, loss_scale: Tensor | None, max_norm: float | None
) -> Scaling:
    """The factor, skip flag and norm that follow from `GradScaler` and clipping, without synchronizing the host.

    Raises ValueError for `max_norm` with a DTensor parameter, whose norm spans ranks.
    """
    skip = None if found_inf is None else found_inf.reshape(()) != 0
    scale: float | Tensor = 1.0 if loss_scale is None else loss_scale.reshape(()).double().reciprocal()
    if max_norm is None:
        return Scaling(scale, skip)
    if are_dtensors(params):
        raise ValueError(
            f"max_norm={max_norm} with a DTensor parameter: its norm spans ranks, and this optimizer does not "
            "communicate; set max_norm=None and call torch.nn.utils.clip_grad_norm_"
        )
    grads = [grad for grad in map(_GRAD, params) if grad is not None]
    devices = list(dict.fromkeys(map(_DEVICE, grads)))
    by_device = [[grad for grad in grads if grad.device == device] for device in devices] if devices[1:] else [grads]
    sums = [grad_stats(same, count_zeros=False).sum_of_squares.to(devices[0]) for same in by_device if same]
    norm = (torch.stack(sums).sum().sqrt() if sums else torch.zeros((), dtype=torch.float64)) * scale
    is_bad = ~(norm < torch.inf)
    # torch computes `max_norm / norm` as a product with the rounded reciprocal; `div_` divides.
    coefficient = torch.full_like(norm, max_norm).div_(norm + 1e-6).clamp_(max=1.0)
    return Scaling(coefficient * scale, is_bad if skip is None else skip | is_bad, norm)


def only_makes_state(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all gradients and learning rates are zero in this first step. `torch.distributed.checkpoint` runs such a
    step to create state that it can save or load into. It must not count as a step."""
    grads = [param.grad for param in params_of(groups) if param.grad is not None]
    return all(float(group["lr"]) == 0 for group in groups) and not any(map(torch.any, map(local, grads)))
