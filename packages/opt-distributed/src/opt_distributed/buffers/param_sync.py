"""When updated parameters are gathered: in the step, or in the background and awaited where they are read."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from enum import Enum, auto

from torch import nn

from opt_distributed.buffers.gather_order import GatherOrder
from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.buffers.wire import CollectiveError, InFlight
from opt_distributed.comm.collectives import Comm


class Gathers(Enum):
    """When a rank sees the parameters that other ranks have updated."""

    IN_STEP = auto()  # when `publish` returns
    BEFORE_USE = auto()  # before they are read (`UseHooks`)
    WHEN_ASKED = auto()  # likewise, but gathers start when a schedule asks for them, or at the first read


class ParamBucket:
    """One bucket of a sharded parameter buffer, which a gather completes in place."""

    def __init__(self, memory: ParamAndGradBuffer, index: int, comm: Comm):
        self.memory, self.index, self.comm = memory, index, comm
        self.ids = tuple(slot.id for slot in memory.layout.buckets[index].slots)
        self._flight: InFlight | None = None
        self.error: CollectiveError | None = None  # of the last gather; until the next one starts, every wait raises it

    @property
    def is_under_way(self) -> bool:
        """Whether a gather was started and nobody has waited for it."""
        return self._flight is not None

    def start(self) -> None:
        """Starts the gather, in place of one that failed.

        Raises:
            CollectiveError: it could not be started.
        """
        self.error = None
        self._flight = self.memory.start_gather(self.index, self.comm)

    def wait(self) -> None:
        """Returns once the parameters are complete.

        Raises:
            CollectiveError: the gather failed, or ran into the group's timeout.
        """
        if self.error is not None:
            raise self.error
        flight, self._flight = self._flight, None
        if flight is not None:
            try:
                flight.finish()
            except CollectiveError as error:
                self.error = error
                raise


class ParamSync:
    """Gathers the buckets of one model chunk in the order of their use.

    A step publishes the buffers it writes one by one; their gathers start with the last of them, inside the step, so
    that their order follows their use rather than their buffers. All start at once: they land in the buffer itself, so
    early ones cost no memory, the next bucket travels while this one computes, and no rank can start a gather late
    because its forward took another path. With `Gathers.WHEN_ASKED` they start later, as `gather_order` says.
    """

    def __init__(self, buckets: Sequence[ParamBucket], *, gathers: Gathers, number: int = 0):
        self.buckets = tuple(buckets)
        self.gathers = gathers
        self.number = number  # of the chunk
        self.order: Sequence[int] = range(len(self.buckets))  # positions in `buckets`, first used first
        self._published: set[int] = set()  # buffers, by identity of their memory
        self.is_pending = False  # whether a parameter may be incomplete; read by compiled code, so a plain attribute
        self._incomplete: set[ParamBucket] = set()  # under way, or their gather failed
        # By identity of the parameter: a tensor compares element by element.
        self._bucket_of = {id(bucket.memory.params[one]): bucket for bucket in self.buckets for one in bucket.ids}
        self.gather_order = GatherOrder([self])

    @property
    def is_due(self) -> bool:
        """Whether shards have been written whose gathers have not begun."""
        return bool(self._published)

    def publish(self, memory: ParamAndGradBuffer, *, together: Collection[ParamAndGradBuffer]) -> None:
        """Reports that this rank's shards of a buffer have been written; with the last of `together`, gathers start."""
        self._published.add(id(memory))
        self.is_pending = True
        if self.gathers is not Gathers.WHEN_ASKED and self._published >= {id(one) for one in together}:
            self.start_due()
            if self.gathers is Gathers.IN_STEP:
                self.wait()

    def start(self) -> None:
        """Starts the gather of every bucket."""
        self._start({id(bucket.memory) for bucket in self.buckets})

    def start_asked(self) -> None:
        """Starts, with `Gathers.WHEN_ASKED`, the gathers that are due, and those of chunks before this one."""
        self.gather_order.start_through(self)

    def wait(self) -> None:
        """Returns once every parameter is complete; starts the gathers that are due."""
        self._start_what_is_read()
        for bucket in self.buckets:
            self._wait_for(bucket)

    def wait_for(self, params: Iterable[nn.Parameter | None]) -> None:
        """Returns once these parameters are complete; starts the gathers that are due."""
        self._start_what_is_read()
        for param in params:
            bucket = self._bucket_of.get(id(param))
            if bucket is not None:
                self._wait_for(bucket)

    def start_due(self) -> None:
        """Starts the gathers of buffers that were published."""
        if self._published:
            self._start(self._published)

    def _start_what_is_read(self) -> None:
        if self.gathers is Gathers.WHEN_ASKED:
            self.start_asked()
        else:
            self.start_due()

    def _start(self, memories: Collection[int]) -> None:
        self._published = set()
        due = [bucket for index in self.order if id((bucket := self.buckets[index]).memory) in memories]
        for number, bucket in enumerate(due):
            with suppress(CollectiveError):  # what failed is gathered again
                self._wait_for(bucket)
            self._incomplete.add(bucket)
            try:
                bucket.start()
            except CollectiveError as error:
                for other in due[number:]:  # their shards were written here, so what they hold of other ranks is old
                    other.error = error
                    self._incomplete.add(other)
                self.is_pending = True
                raise
        self.is_pending = bool(self._incomplete)

    def _wait_for(self, bucket: ParamBucket) -> None:
        if bucket in self._incomplete:
            bucket.wait()
            self._incomplete.discard(bucket)
            self.is_pending = bool(self._incomplete)
