"""Gradients in `param.main_grad` that another library's wrapper has reduced before the step."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from opt_distributed.buffers.binding import GradientError
from opt_distributed.buffers.stored import Converted, stored_dtype
from opt_distributed.step.sources import ReadGrads, Run
from opt_paramgroups import ParamId


class ReducedMainGrads:
    """Gradients that Megatron-Core's `DistributedDataParallel` has reduced on every rank, in `param.main_grad`.

    They are final: means, or sums that were divided by the number of tokens. The step neither reduces nor scales them,
    and every rank updates all of these parameters.
    """

    unresolved: Sequence[ParamId] = ()
    grad_scale = 1.0

    def __init__(self, params: Mapping[ParamId, nn.Parameter]):
        self.params = params
        first = next(iter(params.values()))
        self._converted = Converted(params, dtype=stored_dtype(first), device=first.device)

    def reduce_(self) -> None:
        return None

    def flags(self) -> Tensor:
        return torch.empty(0, dtype=torch.float64)

    def resolve_(self, flags: Tensor) -> None:
        return None

    def unused(self) -> Collection[ParamId]:
        return frozenset()

    def moved(self) -> ParamId | None:
        return self._converted.first()

    def reader(self, runs: Sequence[Run]) -> ReadGrads:
        return lambda: [self._grad(id, of_param) for id, of_param in runs]

    def _grad(self, id: ParamId, of_param: slice) -> Tensor:
        param = self.params[id]
        grad: Tensor | None = getattr(param, "main_grad", None)
        if grad is None or grad.shape != param.shape:
            raise GradientError(
                f"main_grad of {id} is {None if grad is None else tuple(grad.shape)}; the wrapper of this "
                f"parameter must hold its gradient of shape {tuple(param.shape)}"
            )
        return grad if of_param == slice(0, param.numel()) else grad.reshape(-1)[of_param]

    def publish_(self) -> None:
        return None
