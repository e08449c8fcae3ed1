"""Checks of gradients before they are summed over ranks: infinite and NaN ones, and unexpectedly large ones.

The latter like Megatron-Core's `check_for_large_grads` (`rerun_state_machine.is_unexpectedly_large`): the limit is ten
times the largest norm of a bucket in the first hundred iterations. Here the norms are the largest over ranks, so that
all ranks have one limit and one verdict, and the limit counts iterations rather than buckets.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from opt_distributed.buffers.stored import UnusableGradientError
from opt_distributed.buffers.wires import InFlight
from opt_distributed.comm.collectives import Op, Pending
from opt_distributed.comm.device import Device, HostCopy
from opt_distributed.comm.groups import Axes
from opt_kernels.backends import grad_stats
from opt_paramgroups import ParamId


class LargestOverReplicas:
    """The largest of one number over all replicas. Its reduction starts on construction, with that of a bucket, so that
    all ranks launch both in one order."""

    def __init__(self, value: Tensor, axes: Axes, what: str, *, device: Device):
        self._value = value  # (1,)
        self._is_staged = axes.inter.size > 1
        self._flight = InFlight(self._stages(axes), what, device=device, is_staged=self._is_staged)

    def advance(self) -> None:
        """Start the reduction over other optimizer instances, if there are any."""
        if self._is_staged:
            self._flight.advance()

    def finish(self) -> Tensor:
        """Return (1,), on the device of the gradients."""
        self._flight.finish()
        return self._value

    def _stages(self, axes: Axes) -> Iterator[Pending]:
        yield axes.dp.all_reduce_(self._value, op=Op.MAX, async_op=True)
        if self._is_staged:
            yield axes.inter.all_reduce_(self._value, op=Op.MAX, async_op=True)


class NonfiniteGrads(LargestOverReplicas):
    """Which gradients of a bucket are not finite on this rank, and, as fp32 1 or 0, whether any is not on any rank."""

    def __init__(self, grads: Mapping[ParamId, Tensor], axes: Axes, name: str, *, device: Device):
        self.name = name
        self._device = device
        self._ids = [id for id, grad in grads.items() if grad.numel()]
        self._flags = _flags([grads[id] for id in self._ids], like=next(iter(grads.values())))
        super().__init__(self._flags.amax(0, keepdim=True), axes, f"check of {name}", device=device)

    def problem(self) -> UnusableGradientError:
        """The error, given that some gradient is not finite. The host waits for the flags of this rank."""
        flags = HostCopy(self._flags, self._device).wait().tolist()
        bad = [str(id) for id, flag in zip(self._ids, flags, strict=False) if flag]
        if bad:
            return UnusableGradientError(f"gradients of {', '.join(bad)} are not finite on this rank")
        return UnusableGradientError(f"gradients in {self.name} are not finite on another rank")


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


NUM_ITERATIONS = 100
THRESHOLD = 10.0


def largest_norm(grads: Tensor, axes: Axes, what: str, *, device: Device) -> LargestOverReplicas:
    """Start to compute the largest L2 norm of a bucket's gradients over ranks, in float64. Infinite and NaN norms count
    as 0."""
    norm = grad_stats([grads], count_zeros=False).sum_of_squares.sqrt()
    return LargestOverReplicas(norm.nan_to_num(nan=0.0, posinf=0.0).view(1), axes, what, device=device)


class Measured(Protocol):
    """The part of a bucket that is used here."""

    norm: Tensor | None  # (1,) result of `largest_norm`; None before the reduction

    @property
    def name(self) -> str:
        """For errors."""
        ...


class LargeGrads:
    """The limit of one family of buckets, from the norms of their first iterations.

    It is not saved: after a resume it is learned again. Infinite and NaN norms are ignored, because
    `check_for_nan_in_grad` and loss scaling detect them.
    """

    def __init__(self, buckets: Sequence[Measured]):
        self.buckets = tuple(buckets)
        self._num_seen = 0
        self.largest = 0.0  # norm in the first iterations

    def verdict(self) -> UnusableGradientError | None:
        """Return the error if a norm of the reduced iteration is too large. The same on all ranks that reduced it.

        The host reads one number, in the step. Iterations without gradients are not counted.
        """
        norms = [bucket.norm for bucket in self.buckets if bucket.norm is not None]
        if not norms:
            return None
        value, index = (found.item() for found in torch.cat(norms).max(0))
        if self._num_seen >= NUM_ITERATIONS and value > THRESHOLD * self.largest:
            return UnusableGradientError(
                f"gradients in {self.buckets[int(index)].name} are unexpectedly large: their norm on a rank is "
                f"{value:.6g}, and {self.largest:.6g} was the largest in the first {NUM_ITERATIONS} iterations"
            )
        if value > 0 and self._num_seen < NUM_ITERATIONS:
            self._num_seen += 1
            self.largest = max(self.largest, value)
        return None
