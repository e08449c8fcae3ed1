"""`SyncedBuffer`: one buffer of a wrapped chunk, as a `Source` of the step."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from opt_distributed.buffers.param_wires import Fp8ThroughGrads
from opt_distributed.buffers.planner import BufferPlan
from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.comm.groups import Axes
from opt_distributed.layout import Piece
from opt_paramgroups import ParamId


class Chunk(Protocol):
    """The part of the wrapper that its buffers use."""

    def finish_grad_sync(self) -> None: ...

    def lend_grads(self, memory: ParamAndGradBuffer) -> None: ...

    def publish(self, memory: ParamAndGradBuffer, *, together: Sequence[ParamAndGradBuffer]) -> None: ...


class SyncedBuffer:
    """One buffer of a wrapped chunk: a `Source` whose gradients are means already."""

    grad_scale = 1.0
    unresolved: Sequence[ParamId] = ()  # a parameter without a gradient has zeros in the buffer, on every rank

    def __init__(
        self,
        plan: BufferPlan,
        memory: ParamAndGradBuffer,
        axes: Axes,
        chunk: Chunk,
        together: Sequence[ParamAndGradBuffer],  # the buffers that a step publishes, including this one
    ):
        self.plan, self.memory, self.axes = plan, memory, axes
        self._chunk = chunk
        self._together = together

    @property
    def params(self) -> Mapping[ParamId, nn.Parameter]:
        """The parameters of the buffer."""
        return self.memory.params

    def reduce_(self) -> None:
        """Complete the reduction of all gradients of the chunk. A second call in an iteration does nothing."""
        self._chunk.finish_grad_sync()

    def flags(self) -> Tensor:
        """(0,) float64."""
        return torch.empty(0, dtype=torch.float64)

    def resolve_(self, flags: Tensor) -> None:
        """Do nothing: every parameter has a gradient."""

    def unused(self) -> Collection[ParamId]:
        """None: zeros in the buffer are gradients."""
        return ()

    def moved(self) -> ParamId | None:
        """A parameter that has left the buffer; None if all are in it."""
        return self.memory.moved()

    def reader(self, runs: Sequence[tuple[ParamId, slice]]) -> Callable[[], Sequence[Tensor]]:
        """Create a function that returns `grad` of these runs: the same views in every step."""
        views = [self.grad(id, of_param) for id, of_param in runs]
        return lambda: views

    def grad(self, id: ParamId, of_param: slice) -> Tensor:
        """The reduced gradient of these flat elements, which this rank must own; in the parameter's shape if whole."""
        return self.memory.grad_piece(id, of_param)

    def publish_(self) -> None:
        """Report that this rank's parameters have been written. Gathers start with the last buffer of the step."""
        if self.memory.wire is not None:
            self._chunk.publish(self.memory, together=self._together)

    @property
    def through_grads(self) -> Fp8ThroughGrads | None:
        """The wire of parameters that are gathered through the gradients' memory; None if they are not."""
        return self.memory.wire if isinstance(self.memory.wire, Fp8ThroughGrads) else None

    def lend_grads_(self) -> None:
        """Lend the gradients' memory to the parameters, until the next iteration.

        Raises:
            GradientError: gradients have been added since the last step.
        """
        self._chunk.lend_grads(self.memory)

    def owned(self) -> Iterator[Piece]:
        """The pieces whose reduced gradients this rank has: its own, or all after a reduction on every rank."""
        layout = self.plan.layout
        if self.memory.reduces_everywhere:
            wholes = ((slot.id, slice(0, slot.numel)) for slot in layout.slots())
            return (Piece(id, of_param=whole, of_shard=whole) for id, whole in wholes)
        rank = self.axes.dp.rank if layout.num_shards > 1 else 0
        return (owned.piece for owned in layout.owned(rank))

    def published_with(self, buffers: Sequence["SyncedBuffer"]) -> "SyncedBuffer":
        """Return this buffer for a step that publishes only `buffers` of the chunk.

        Gathers of dense buffers do not wait for experts: replicas without experts would start them earlier than others.
        """
        together = [one.memory for one in buffers if one.plan.is_expert == self.plan.is_expert]
        return SyncedBuffer(self.plan, self.memory, self.axes, self._chunk, together)

    def results(self) -> Iterator[Tensor]:
        """This rank's part of the reduced gradients: a view for each bucket."""
        for index in range(len(self.plan.layout.buckets)):
            yield self.memory.result(index, self.axes.dp.rank)
