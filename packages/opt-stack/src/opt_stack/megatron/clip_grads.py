"""Norms, clipping and zeros of `param.grad`, as in Megatron-Core's module of this name.

`Optimizer.step` uses none of it, because it clips while it reads gradients.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from opt_config import ConfigError
from opt_distributed.comm import Comm, TorchComm, world
from opt_paramgroups import is_dtensor
from opt_stack.megatron.modules import absent

Tensors = Iterable[Tensor] | Tensor
__all__ = ["clip_grad_by_total_norm_fp32", "count_zeros_fp32", "get_grad_norm_fp32"]
__getattr__ = partial(absent, module=__name__)


@torch.no_grad()
def get_grad_norm_fp32(
    grads_for_norm: Tensors,
    norm_type: float | str = 2,
    grad_stats_parallel_group: ProcessGroup | None = None,
) -> float:
    """Return the norm of gradients over a group; None: over the world. Collective, also for ranks without gradients.

    `norm_type` may be "inf". The norm is NaN or infinite if an element is. Raises ConfigError for DTensors.
    """
    norm_type = float(norm_type)
    grads = _plain(grads_for_norm)
    comm = _comm(grad_stats_parallel_group)
    if math.isinf(norm_type):
        norms = comm.gather_objects([float(grad.abs().amax()) for grad in grads if grad.numel()])
        largest = [norm for of_rank in norms for norm in of_rank]
        return math.nan if any(map(math.isnan, largest)) else max(largest, default=0.0)
    powers = [float(torch.linalg.vector_norm(grad, norm_type, dtype=torch.float32)) ** norm_type for grad in grads]
    total: float = sum(comm.gather_objects(sum(powers))) ** (1.0 / norm_type)
    return total


@torch.no_grad()
def clip_grad_by_total_norm_fp32(
    parameters: Tensors, max_norm: float, total_norm: float | Tensor, use_decoupled_grad: bool = False
) -> None:
    """Multiply gradients in place by `max_norm / (total_norm + 1e-6)` if that is below 1; all of them on every rank.

    Raises:
        ConfigError: `use_decoupled_grad` is set, or a gradient is a DTensor.
    """
    factor = max_norm / (float(total_norm) + 1e-6)
    for grad in _grads(parameters, use_decoupled_grad):
        if factor < 1.0:
            grad.mul_(factor)


def count_zeros_fp32(
    parameters: Tensors,
    grad_stats_parallel_group: ProcessGroup | None = None,
    use_decoupled_grad: bool = False,
    tp_group: ProcessGroup | None = None,
) -> int:
    """Return the number of zeros in gradients over a group; None: over the world. Collective.

    Parameters marked `shared` are not counted, and those that tensor parallelism replicates only on the first rank of
    `tp_group`. Raises ConfigError as `clip_grad_by_total_norm_fp32`.
    """
    counted = [param for param in _listed(parameters) if not getattr(param, "shared", False)]
    if tp_group is not None and tp_group.rank() > 0:
        counted = [param for param in counted if getattr(param, "tensor_model_parallel", False)]
    zeros = sum(grad.numel() - int(grad.count_nonzero()) for grad in _grads(counted, use_decoupled_grad))
    comm = _comm(grad_stats_parallel_group)
    return sum(comm.gather_objects(zeros))


def _grads(parameters: Tensors, use_decoupled_grad: bool) -> Sequence[Tensor]:
    if use_decoupled_grad:
        raise ConfigError("use_decoupled_grad=True: gradients here are in param.grad only; leave it at False")
    return _plain(param.grad for param in _listed(parameters) if param.grad is not None)


def _plain(tensors: Tensors) -> list[Tensor]:
    found = _listed(tensors)
    if any(is_dtensor(tensor) for tensor in found):
        raise ConfigError(
            "a gradient is a DTensor, whose mesh this function does not sum over; use optimizer.get_grad_norm(), "
            "clip_grad_norm(max_norm) and count_zeros() between prepare_grads() and step_with_ready_grads()"
        )
    return found


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _comm(group: ProcessGroup | None) -> Comm:
    return world() if group is None else TorchComm(group)
