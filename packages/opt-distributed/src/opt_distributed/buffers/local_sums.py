"""Local fp32 accumulation of 16-bit gradients over microbatches, before they are reduced over ranks."""

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
    """One fp32 tensor in which the gradients of many parameters accumulate: `views`, in their shapes.

    Before the reduction, each gradient is rounded once to the dtype of the buffer. This only improves sums over
    microbatches: a single backward pass gives the same bits as accumulation in the buffer.
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
        """Begin an iteration with zeros. Allocates the memory again if it was freed."""
        if self._is_released:
            self._is_released = False
            self._queues.take_back_(self._data)
        self._data.zero_()

    def release_(self) -> None:
        """Free the memory until `zero_`. The views must not be used until then."""
        if not self._is_released:
            self._is_released = True
            self._queues.release_(self._data)


def local_sums(
    params: Sequence[ParamShape], patterns: Collection[str], *, grad_dtype: torch.dtype, device: torch.device
) -> LocalSums:
    """Create the sums of parameters whose names match; of none if their gradient buffer is fp32 or wider."""
    is_narrow = torch.finfo(grad_dtype).bits < 32
    return LocalSums([param for param in params if is_narrow and matches(param.id.name, patterns)], device)
