"""Checks in every step whether parameters are still in the memory that updates write to: a pass in C over all."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from opt_distributed.buffers.stored import address, stored_dtype
from opt_kernels.backends.layouts import Layouts
from opt_paramgroups import ParamId


class Converted:
    """Detects a parameter that no longer has this dtype or device."""

    def __init__(self, params: Mapping[ParamId, nn.Parameter], *, dtype: torch.dtype, device: torch.device):
        self._params, self._dtype, self._device = params, dtype, device
        self._layouts: Layouts | None = None  # of the parameters, when all were as they should be

    def first(self) -> ParamId | None:
        """The first such parameter; None if there is none."""
        values = list(self._params.values())
        if self._layouts is not None and self._layouts.same(values):
            return None
        found = next((id for id, param in self._params.items() if self._is_converted(param)), None)
        # The memory of other types, such as DTensors, is elsewhere.
        is_kept = found is None and set(map(type, values)) <= {nn.Parameter}
        self._layouts = Layouts(values) if is_kept else None
        return found

    def _is_converted(self, param: nn.Parameter) -> bool:
        return stored_dtype(param) is not self._dtype or param.device != self._device


class Left:
    """Detects later whether a parameter has left its present address."""

    def __init__(self, params: Mapping[ParamId, nn.Parameter]):
        self._params = params
        self._addresses = [address(param) for param in params.values()]

    def first(self) -> ParamId | None:
        """The first such parameter; None if there is none."""
        values = list(self._params.values())
        if set(map(type, values)) <= {nn.Parameter} and list(map(Tensor.data_ptr, values)) == self._addresses:
            return None
        addresses = zip(self._params.items(), self._addresses, strict=True)
        return next((id for (id, param), before in addresses if address(param) != before), None)
