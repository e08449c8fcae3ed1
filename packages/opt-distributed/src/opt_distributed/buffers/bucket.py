"""One bucket of gradients in an iteration: accumulating, then on the wire, then reduced."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.buffers.wire import InFlight, Wire
from opt_distributed.comm.collectives import Op
from opt_distributed.comm.groups import Axes
from opt_paramgroups import ParamId


class GradientError(RuntimeError):
    """Gradients that came out of turn, or that a check found unusable."""


class BucketState(Enum):
    """Where a bucket is in an iteration."""

    ACCUMULATING = auto()  # from `begin` on: backward passes add to it
    IN_FLIGHT = auto()  # from `launch` on: its memory belongs to the collective
    REDUCED = auto()  # from `finish` on: this rank's shard holds the result
    AWAY = auto()  # from `send_away` on: its memory is somebody else's


@dataclass(frozen=True, slots=True, kw_only=True)
class Travel:
    """How the gradients of one buffer are reduced."""

    name: str  # of the buffer, for errors
    wire: Wire
    axes: Axes  # its replicas
    scale_before: float = 1.0  # of what is sent
    scale_after: float = 1.0  # of the sum
    check_for_nan: bool = False


class GradBucket:
    """One bucket of a buffer, and which of its parameters have had their gradients."""

    def __init__(self, memory: ParamAndGradBuffer, index: int, travel: Travel):
        self.memory, self.index, self.travel = memory, index, travel
        self.ids = tuple(slot.id for slot in memory.layout.buckets[index].slots)
        self.state = BucketState.ACCUMULATING
        self.arrivals: dict[ParamId, int] = {}  # backward passes that brought a gradient, in the last microbatch
        self.expected: Mapping[ParamId, int] = dict.fromkeys(self.ids, 1)
        self._flight: InFlight | None = None
        self._missing = len(self.ids)  # parameters with fewer arrivals than expected

    @property
    def is_complete(self) -> bool:
        """Whether every parameter has had as many gradients as it will get."""
        return self._missing == 0

    @property
    def result(self) -> Tensor:
        """What is reduced here: this rank's shard; the whole bucket where it is replicated. A view."""
        return self.memory.result(self.index, self.travel.axes.dp.rank)

    def note(self, id: ParamId) -> None:
        """A gradient of this parameter has been added."""
        count = self.arrivals.get(id, 0) + 1
        self.arrivals[id] = count
        self._missing -= count == self.expected[id]

    def check_accumulating(self, id: ParamId) -> None:
        """Raises GradientError where a gradient of this parameter may not be added now."""
        self._check_here()
        if self.state is BucketState.REDUCED:
            raise GradientError(
                f"a gradient of {id} came after the reduction; call zero_grad_buffer() between iterations"
            )
        if self.state is BucketState.IN_FLIGHT:
            raise GradientError(
                f"gradient number {self.arrivals.get(id, 0) + 1} of {id} came when its bucket was on the wire: "
                f"{self.expected[id]} came in the first iteration; run all but the last backward pass inside no_sync()"
            )

    @torch.no_grad()
    def launch(self, iteration: int) -> None:
        """Starts the reduction.

        Raises:
            GradientError: on every rank, if any rank's gradients are not finite and that is checked.
            CollectiveError: it could not be started.
        """
        self._check_here()
        full = self.memory.grad_bucket(self.index)
        if self.travel.check_for_nan:
            self._check_finite(full)
        if self.travel.scale_before != 1.0:
            full.mul_(self.travel.scale_before)
        self.state = BucketState.IN_FLIGHT
        what = f"gradient reduction {iteration} of bucket {self.index} of {self.travel.name}"
        self._flight = InFlight(self.travel.wire.stages(full, self.result), what)

    def advance(self) -> None:
        """Lets a reduction of several stages go on to the next, if such a one is under way."""
        if self._flight is not None and self.travel.wire.is_staged:
            self._flight.advance()

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the reduction; nothing where there is none under way.

        Raises:
            CollectiveError: it failed, or ran into the group's timeout.
        """
        if self._flight is None:
            return
        flight, self._flight = self._flight, None
        flight.finish()
        if self.travel.scale_after != 1.0:
            self.result.mul_(self.travel.scale_after)
        self.state = BucketState.REDUCED

    def begin(self) -> None:
        """A new iteration."""
        self.finish()
        self.state = BucketState.ACCUMULATING
        self.arrivals = {}
        self._missing = len(self.ids)

    def scale_(self, factor: float | Tensor) -> None:
        """Multiplies the gradients; once they are reduced, only the result.

        Raises:
            GradientError: the reduction is under way.
        """
        if self.state is BucketState.IN_FLIGHT:
            raise GradientError("gradients cannot be scaled while they are on the wire; call finish_grad_sync() first")
        whole = self.memory.grad_bucket(self.index)
        (self.result if self.state is BucketState.REDUCED else whole).mul_(factor)

    def send_away(self) -> None:
        """The memory is about to be given away, until `begin`."""
        self.state = BucketState.AWAY

    def _check_here(self) -> None:
        if self.state is BucketState.AWAY:
            raise GradientError("the gradients' memory was given away; call restore_grad_buffers() first")

    def learn(self) -> None:
        """Expects from now on what came this time; of a parameter that had no gradient, one."""
        self.expected = {id: max(self.arrivals.get(id, 0), 1) for id in self.ids}

    def _check_finite(self, full: Tensor) -> None:
        bad = [id for id in self.ids if not bool(self.memory.grad_view(id).isfinite().all())]
        found = torch.tensor([float(len(bad))], device=full.device)
        for comm in (self.travel.axes.dp, self.travel.axes.inter):
            comm.all_reduce_(found, op=Op.MAX)
        if bad:
            raise GradientError(f"gradients of {', '.join(map(str, bad))} are not finite on this rank")
        if found.item():
            raise GradientError(
                f"gradients in bucket {self.index} of {self.travel.name} are not finite on another rank"
            )
