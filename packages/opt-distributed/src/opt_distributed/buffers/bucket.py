"""One bucket of gradients in an iteration: accumulating, then being reduced, then reduced; checks before its sum."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from opt_distributed.buffers.main_grad import (
    GradientError,
    RefusedGradientError,
    UnusableGradientError,
    adopt_main_grad_,
    bind_main_grad,
)
from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.buffers.stored import ParamTensors
from opt_distributed.buffers.wires import InFlight, PlainSum, Wire, to_owners
from opt_distributed.comm.collectives import Op, Pending
from opt_distributed.comm.device import HostCopy
from opt_distributed.comm.roles import Axes
from opt_kernels.backends import grad_stats
from opt_paramgroups import ParamId

NUM_ITERATIONS = 100
THRESHOLD = 10.0


class GradChecks:
    """Numbers of a bucket's gradients before their reduction, over all replicas: whether any is not finite, and a norm.

    Their reduction starts on construction, with that of the bucket, so that all ranks launch both in one order.
    """

    def __init__(self, bucket: "GradBucket", full: Tensor):
        reduction = bucket.reduction
        device = bucket.memory.queues
        views = bucket.views
        self._name = bucket.name
        self._device = device
        self._ids = [id for id, view in views.items() if view.numel()] if reduction.check_for_nan else []
        self._flags = torch.zeros(1, dtype=torch.float64, device=full.device)  # of each parameter: not finite
        # On a CPU one reduction over the bucket is enough, unless a parameter must be named.
        if self._ids and (device.is_asynchronous or not torch.stack(full.aminmax()).isfinite().all()):
            largest = torch.stack(torch._foreach_norm([views[id] for id in self._ids], torch.inf))
            self._flags = (~largest.isfinite()).to(torch.float64)
        norm = self._flags.new_zeros(())
        if reduction.check_for_large:  # infinite and NaN norms count as 0
            norm = grad_stats([full], count_zeros=False).sum_of_squares.sqrt().nan_to_num(nan=0.0, posinf=0.0)
        self._largest = torch.stack([self._flags.amax(), norm])
        axes = reduction.axes
        what = f"check of {bucket.name}"
        self._flight = InFlight(self._stages(axes), what, device=device, is_staged=axes.inter.size > 1)

    def advance(self) -> None:
        """Start the reduction over other optimizer instances, if there are any."""
        self._flight.advance()

    def finish(self) -> Tensor:
        """Return (2,) float64: 1 if a gradient of any rank is not finite, and the largest norm of a rank."""
        self._flight.finish()
        return self._largest

    def problem(self) -> RefusedGradientError:
        """The error, given that some gradient is not finite. The host waits for the flags of this rank."""
        flags = HostCopy(self._flags, self._device).wait().tolist()
        bad = [str(id) for id, flag in zip(self._ids, flags, strict=False) if flag]
        if bad:
            return RefusedGradientError(f"gradients of {', '.join(bad)} are not finite on this rank")
        return RefusedGradientError(f"gradients in {self._name} are not finite on another rank")

    def _stages(self, axes: Axes) -> Iterator[Pending]:
        yield axes.dp.all_reduce_(self._largest, op=Op.MAX, async_op=True)
        if axes.inter.size > 1:
            yield axes.inter.all_reduce_(self._largest, op=Op.MAX, async_op=True)


class LargeGrads:
    """The limit of one family of buckets, from the norms of their first iterations.

    Like Megatron-Core's `check_for_large_grads` (`rerun_state_machine.is_unexpectedly_large`): the limit is ten times
    the largest norm of a bucket in the first hundred iterations. Here the norms are the largest over ranks, so that all
    ranks have one limit and one verdict, and the limit counts iterations rather than buckets. It is not saved: after a
    resume it is learned again. Infinite and NaN norms are ignored, because `check_for_nan_in_grad` and loss scaling
    detect them. Iterations without gradients are not counted.
    """

    def __init__(self) -> None:
        self._num_seen = 0
        self.largest = 0.0  # norm in the first iterations

    def verdict(self, norm: float, name: str) -> RefusedGradientError | None:
        """Return the error if the largest norm of the reduced iteration, of bucket `name`, is too large."""
        if self._num_seen >= NUM_ITERATIONS and norm > THRESHOLD * self.largest:
            return RefusedGradientError(
                f"gradients in {name} are unexpectedly large: their norm on a rank is {norm:.6g}, and "
                f"{self.largest:.6g} was the largest in the first {NUM_ITERATIONS} iterations"
            )
        if norm > 0 and self._num_seen < NUM_ITERATIONS:
            self._num_seen += 1
            self.largest = max(self.largest, norm)
        return None


class BucketState(Enum):
    """The state of a bucket in an iteration."""

    ACCUMULATING = auto()  # after `begin`: backward passes add to it
    IN_FLIGHT = auto()  # after `launch`: its memory must not be used
    REDUCED = auto()  # after `finish`: this rank's shard holds the result
    RELEASED = auto()  # its memory is freed, until `begin`


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How the gradients of one buffer are reduced."""

    name: str  # of the buffer, for errors
    wire: Wire
    axes: Axes  # its replicas
    is_expert: bool
    scale_before: float  # of gradients, before the reduction
    scale_after: float  # of the sum
    check_for_nan: bool
    check_for_large: bool


class LaunchKey(NamedTuple):
    """The place of one reduction among all others; smaller ones are launched first."""

    is_late: bool  # launched by `finish` on every rank, because some rank may lack one of its gradients
    chunk: int  # negated number of the model chunk: backward reaches the last chunk first
    time: float  # when the bucket became complete on the first of its replicas, as a share of the chunk's buckets
    is_expert: bool
    number: int  # among the chunk's buckets


class GradBucket:
    """One bucket of a buffer, which tracks the parameters whose gradients have arrived.

    `main_grad` is bound to `accumulators` while gradients accumulate, and to `views` of the buffer after `launch`.
    These are the same tensors, except for the parameters in `sums`, which accumulate separately in fp32.
    """

    key: LaunchKey  # set by `GradSync`

    def __init__(self, memory: ParamAndGradBuffer, index: int, reduction: Reduction, *, sums: ParamTensors):
        self.memory = memory
        self.index = index
        self.reduction = reduction
        self.ids = tuple(slot.id for slot in memory.layout.buckets[index].slots)
        self.views = {id: memory.grad_view(id) for id in self.ids}
        self.sums = {id: sums[id] for id in self.ids if id in sums}
        self.accumulators = {**self.views, **self.sums}
        self.state = BucketState.ACCUMULATING
        self.arrivals: dict[ParamId, int] = {}  # gradients added in the last microbatch
        self.expected: Mapping[ParamId, int] = dict.fromkeys(self.ids, 1)
        self.problem: UnusableGradientError | None = None  # why this iteration's gradients must not be used
        self.checks: GradChecks | None = None  # of this iteration, if there are any
        self._flight: InFlight | None = None
        self._missing = len(self.ids)  # parameters with fewer arrivals than expected

    @property
    def name(self) -> str:
        """For errors."""
        return f"bucket {self.index} of {self.reduction.name}"

    @property
    def is_complete(self) -> bool:
        """Whether every parameter has received as many gradients as expected."""
        return self._missing == 0

    @property
    def result(self) -> Tensor:
        """A view of this rank's reduced gradients: its shard, or the whole bucket if every rank has all of them."""
        if self.memory.reduces_everywhere:
            return self.memory.grad_bucket(self.index)
        return self.memory.result(self.index, self.reduction.axes.dp.rank)

    def note(self, id: ParamId) -> None:
        """Note that a gradient of this parameter was added."""
        count = self.arrivals.get(id, 0) + 1
        self.arrivals[id] = count
        self._missing -= count == self.expected[id]

    def check_accumulating(self, id: ParamId) -> None:
        """Raise GradientError if a gradient of this parameter may not be added now."""
        self.check_here()
        if self.state is BucketState.REDUCED:
            raise GradientError(
                f"a gradient of {id} arrived after the reduction; call zero_grad_buffer() or the optimizer's "
                "zero_grad() between iterations"
            )
        if self.state is BucketState.IN_FLIGHT:
            raise GradientError(
                f"gradient {self.arrivals.get(id, 0) + 1} of {id} arrived while its bucket was being reduced; the "
                f"first iteration had {self.expected[id]}; run all but the last backward pass inside no_sync()"
            )

    def adopt(self) -> None:
        """Copy tensors that the caller bound to ``param.main_grad`` to the tensors bound here.

        Raises:
            GradientError: such a tensor does not have the shape of its parameter.
        """
        self.check_here()
        bound = self.accumulators if self.state is BucketState.ACCUMULATING else self.views
        for id, view in bound.items():
            adopt_main_grad_(self.memory.params[id], view, id)

    @torch.no_grad()
    def launch(self, iteration: int) -> None:
        """Start the reduction.

        Gradients that must not be used set `problem`. They are reduced nevertheless, so that no rank waits for this
        one, and `GradSync.finish` raises.

        Raises:
            CollectiveError: it could not be started.
        """
        try:
            self._adopt_or_note()
        except Exception as error:  # of any kind, because the other ranks wait
            self.problem = UnusableGradientError(f"a gradient of {self.name} could not be read: {error}")
        for id, total in self.sums.items():
            self.views[id].copy_(total)
            bind_main_grad(self.memory.params[id], self.views[id])
        full = self.memory.grad_bucket(self.index)
        self.state = BucketState.IN_FLIGHT
        if self.reduction.check_for_nan or self.reduction.check_for_large:
            self.checks = GradChecks(self, full)
        if self.memory.local_squares is not None:
            self.memory.local_squares[self.index] = torch.linalg.vector_norm(full, dtype=torch.float64).square()
        if self.reduction.scale_before != 1.0:
            full.mul_(self.reduction.scale_before)
        what = f"gradient reduction {iteration} of {self.name}"
        axes = self.reduction.axes
        if self.memory.reduces_everywhere:
            wire: Wire = PlainSum(axes, to_shards=False)
        else:
            wire = to_owners(self.reduction.wire, self.memory.layout.buckets[self.index], axes.dp)
        stages = wire.stages(full, self.result)
        self._flight = InFlight(stages, what, device=self.memory.queues, is_staged=wire.is_staged)

    def advance(self) -> None:
        """Wait for the present stage of a reduction in several stages and start the next, if one is pending."""
        if self.checks is not None:
            self.checks.advance()
        if self._flight is not None:
            self._flight.advance()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for a pending reduction, or copy a ``param.main_grad`` that was rebound after it.

        Raises:
            CollectiveError: it failed, or exceeded the timeout of its group. The next calls until `begin` set
                `problem`, because the contents of the buffer are undefined.
        """
        self.refuse(self._find_assigned())
        if self._flight is None:
            if self.state is BucketState.REDUCED:
                self._adopt_or_note()
            elif self.state is BucketState.IN_FLIGHT:
                failed = f"the reduction of {self.name} failed, so its gradients are undefined"
                self.refuse(
                    UnusableGradientError(
                        f"{failed}; call zero_grad_buffer() or the optimizer's zero_grad(), and run the iteration again"
                    )
                )
            return
        self._on_arrival()
        if self.reduction.scale_after != 1.0:
            self.result.mul_(self.reduction.scale_after)
        self.state = BucketState.REDUCED
        for id, view in self.views.items():
            if getattr(self.memory.params[id], "main_grad", None) is not view:
                replaced = f"main_grad of {id} was replaced while its bucket was being reduced"
                self.refuse(UnusableGradientError(f"{replaced}; call finish_grad_sync() before you replace it"))

    def refuse(self, problem: UnusableGradientError | None) -> None:
        """Note why this iteration's gradients must not be used, if `problem` says so. The first one counts."""
        self.problem = self.problem or problem

    def begin(self) -> None:
        """Begin an iteration."""
        self._on_arrival()
        self.state = BucketState.ACCUMULATING
        self.memory.reduces_everywhere = False
        self.problem = self.checks = None
        self.arrivals = {}
        self._missing = len(self.ids)

    def scale_(self, factor: float | Tensor) -> None:
        """Multiply the gradients; after the reduction, only the result on this rank.

        Raises:
            GradientError: the reduction is pending.
        """
        if self.state is BucketState.IN_FLIGHT:
            raise GradientError(
                "gradients cannot be scaled while they are being reduced; call finish_grad_sync() first"
            )
        self.adopt()
        if self.state is BucketState.REDUCED:
            self.result.mul_(factor)
            return
        for tensor in (self.memory.grad_bucket(self.index), *self.sums.values()):
            tensor.mul_(factor)

    def lend_storage_(self) -> None:
        """Let the gradients be overwritten. Until `begin`, `problem` says so if they are used again.

        Raises:
            GradientError: no step has used them yet, because they are accumulating or being reduced.
        """
        self.check_here()
        if self.state is BucketState.IN_FLIGHT or (self.state is BucketState.ACCUMULATING and self.arrivals):
            raise GradientError(
                f"parameters would be gathered through gradients of {self.name} that no step has used; call "
                "zero_grad_buffer(), or step, before you load or publish main values"
            )
        if self.state is BucketState.REDUCED:
            self.problem = UnusableGradientError(
                f"gradients of {self.name} were overwritten by the parameters of the last step "
                "(reuse_grad_buf_for_mxfp8_param_ag=True); call zero_grad_buffer() or the optimizer's zero_grad() "
                "between iterations"
            )

    def check_here(self) -> None:
        """Raise GradientError if the gradients' memory was freed."""
        if self.state is BucketState.RELEASED:
            raise GradientError(
                "the gradients' memory was freed by offload_grad_buffers(); call restore_grad_buffers() first"
            )

    def _on_arrival(self) -> None:
        flight = self._flight
        self._flight = None
        if self.checks is not None:
            self.checks.finish()
        if flight is not None:
            flight.finish()

    def _adopt_or_note(self) -> None:
        try:
            self.adopt()
        except GradientError as error:
            self.refuse(UnusableGradientError(str(error)))

    def _find_assigned(self) -> UnusableGradientError | None:
        """A gradient that the caller assigned to ``param.grad``, which no backward pass adds to the buffer. It may be
        the buffer's own."""
        for id in self.ids:
            grad = self.memory.params[id].grad
            if grad is None:
                continue
            own = (self.views[id].data_ptr(), self.accumulators[id].data_ptr())
            if grad.layout is not torch.strided or grad.data_ptr() not in own:  # sparse tensors have no address
                return UnusableGradientError(
                    f"grad of {id} was assigned, but gradients of a wrapped model accumulate in main_grad; write "
                    "param.main_grad.add_(grad) instead, or call zero_grad() to drop it"
                )
        return None
