"""Infinite and NaN gradients, found bucket by bucket before they are summed over ranks, without a wait in backward."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from opt_distributed.buffers.binding import UnusableGradientError
from opt_distributed.buffers.wire import InFlight
from opt_distributed.comm.collectives import Op, Pending
from opt_distributed.comm.device import Device, HostCopy
from opt_distributed.comm.groups import Axes
from opt_paramgroups import ParamId


class NonfiniteGrads:
    """Which gradients of a bucket are not finite here, and whether any is on another rank: on its way from construction
    on, and read in the step.

    It starts with the bucket's reduction, so that all ranks launch both in one order.
    """

    def __init__(self, grads: Mapping[ParamId, Tensor], axes: Axes, name: str, *, device: Device):
        self.name = name
        self._device = device
        self._ids = [id for id, grad in grads.items() if grad.numel()]
        self._flags = _flags([grads[id] for id in self._ids], like=next(iter(grads.values())))
        self._found = self._flags.amax(0, keepdim=True)
        self._is_staged = axes.inter.size > 1
        self._flight = InFlight(self._stages(axes), f"check of {name}", device=device, is_staged=self._is_staged)

    def advance(self) -> None:
        """Goes on to the other optimizer instances, if there are any."""
        if self._is_staged:
            self._flight.advance()

    def finish(self) -> Tensor:
        """(1,) float32, on the device of the gradients: one where a rank has found any."""
        self._flight.finish()
        return self._found

    def problem(self) -> UnusableGradientError:
        """What is wrong, where any was found. The host waits for this rank's part."""
        flags = HostCopy(self._flags, self._device).wait().tolist()
        bad = [str(id) for id, flag in zip(self._ids, flags, strict=False) if flag]
        if bad:
            return UnusableGradientError(f"gradients of {', '.join(bad)} are not finite on this rank")
        return UnusableGradientError(f"gradients in {self.name} are not finite on another rank")

    def _stages(self, axes: Axes) -> Iterator[Pending]:
        yield axes.dp.all_reduce_(self._found, op=Op.MAX, async_op=True)
        if self._is_staged:
            yield axes.inter.all_reduce_(self._found, op=Op.MAX, async_op=True)


def are_bad(checks: Sequence[NonfiniteGrads], device: Device) -> list[bool]:
    """For each check, which are complete, whether any rank has found anything. The host waits once for all."""
    if not checks:
        return []
    found = HostCopy(torch.cat([check.finish() for check in checks]), device).wait()
    return [bool(flag) for flag in found.tolist()]


def _flags(grads: Sequence[Tensor], *, like: Tensor) -> Tensor:
    """(max(len(grads), 1),) float32: one for each gradient with an element that is not finite."""
    if not grads:
        return torch.zeros(1, dtype=torch.float32, device=like.device)
    largest = torch.stack(torch._foreach_norm(list(grads), torch.inf))
    return (~largest.isfinite()).to(torch.float32)
