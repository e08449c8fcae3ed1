"""Detection of infinite and NaN gradients in each bucket before it is reduced, without a host wait in backward."""

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
    """Which gradients of a bucket are not finite on this rank, and whether any is not finite on any rank.

    The check starts on construction, with the bucket's reduction, so that all ranks launch both in one order. The step
    reads its result.
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
        """Start the reduction over other optimizer instances, if there are any."""
        if self._is_staged:
            self._flight.advance()

    def finish(self) -> Tensor:
        """Return (1,) float32 on the device of the gradients: 1 if any rank has a gradient that is not finite."""
        self._flight.finish()
        return self._found

    def problem(self) -> UnusableGradientError:
        """The error, given that some gradient is not finite. The host waits for the flags of this rank."""
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
    """For each check, whether any rank has a gradient that is not finite. The host waits once for all of them."""
    if not checks:
        return []
    found = HostCopy(torch.cat([check.finish() for check in checks]), device).wait()
    return [bool(flag) for flag in found.tolist()]


def _flags(grads: Sequence[Tensor], *, like: Tensor) -> Tensor:
    """(max(len(grads), 1),) float32: 1 for each gradient with an element that is not finite, else 0."""
    if not grads:
        return torch.zeros(1, dtype=torch.float32, device=like.device)
    largest = torch.stack(torch._foreach_norm(list(grads), torch.inf))
    return (~largest.isfinite()).to(torch.float32)
