"""fp32 sums of narrow gradients on this rank: what a parameter's microbatches add up to before it is sent."""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from opt_distributed.comm import device as devices
from opt_distributed.layout import ParamShape
from opt_paramgroups import ParamId

ALL = "all"  # the pattern that every name matches


def matches(name: str, patterns: Collection[str]) -> bool:
    """Whether a parameter's name matches one of the shell patterns (`fnmatch`, case-sensitive); "all" is every name."""
    return any(pattern == ALL or fnmatchcase(name, pattern) for pattern in patterns)


class LocalSums:
    """One fp32 tensor for the gradients of many parameters; `views` are where they accumulate, in their shapes.

    Before its reduction, a gradient is rounded once to the dtype in which it travels, and the memory here is free for
    the next iteration. Only sums over microbatches gain: a single backward pass gives the bits of plain accumulation.
    """

    def __init__(self, params: Sequence[ParamShape], device: torch.device):
        self._data = torch.zeros(sum(param.numel for param in params), dtype=torch.float32, device=device)
        self._queues = devices.device_of(device)
        self._is_released = False
        parts = torch.split(self._data, [param.numel for param in params])
        self.views: Mapping[ParamId, Tensor] = {
            param.id: part.view(param.shape) for param, part in zip(params, parts, strict=True)
        }

    @torch.no_grad()
    def zero_(self) -> None:
        """Begins an iteration. Takes the memory back if it was given away."""
        if self._is_released:
            self._is_released = False
            self._queues.take_back_(self._data)
        self._data.zero_()

    def release_(self) -> None:
        """Gives the memory back until `zero_`; the views are unreadable until then."""
        if not self._is_released:
            self._is_released = True
            self._queues.release_(self._data)


def local_sums(
    params: Sequence[ParamShape], patterns: Collection[str], *, grad_dtype: torch.dtype, device: torch.device
) -> LocalSums:
    """The sums of the parameters whose names match; of none where gradients are fp32 (or wider) in their buffer."""
    is_narrow = torch.finfo(grad_dtype).bits < 32
    return LocalSums([param for param in params if is_narrow and matches(param.id.name, patterns)], device)
