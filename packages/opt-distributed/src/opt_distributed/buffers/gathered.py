"""`GatheredParams`: the parameters of a buffer, of which ranks update shards or everything."""

from collections.abc import Collection, Sequence, Set
from contextlib import AbstractContextManager

from opt_distributed.buffers.param_sync import ParamBucket, ParamSync
from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.comm.collectives import Comm
from opt_paramgroups import ParamId


class GatheredParams:
    """The parameters of `memory`, whose new values a step publishes with those of other buffers `together`."""

    def __init__(self, memory: ParamAndGradBuffer, sync: ParamSync, together: Set[ParamAndGradBuffer]):
        self.memory = memory
        self.sync = sync
        self.together = together

    @classmethod
    def alone(cls, memory: ParamAndGradBuffer, comm: Comm) -> "GatheredParams":
        """Create those of a buffer of plain modules, whose gathers end in the step."""
        numbers = range(len(memory.layout.buckets)) if memory.wire is not None else ()
        buckets = [ParamBucket(memory, number, comm) for number in numbers]
        return cls(memory, ParamSync(buckets), {memory})

    def moved(self) -> ParamId | None:
        """A parameter that has left the buffer; None if all are in it."""
        return self.memory.moved()

    def follow_(self, *, frees: bool = False) -> Collection[ParamId]:
        """Take parameters that were moved away and back into the buffer. See `ParamAndGradBuffer.take_back_`.

        Waits for gathers under way. Raises StorageError for a parameter that has left during its gather.
        """
        self.sync.wait()
        return self.memory.take_back_(frees=frees)

    def sending(self, ids: Collection[ParamId]) -> AbstractContextManager[Sequence[int]]:
        """See `ParamSync.sending`."""
        return self.sync.sending(self.memory, ids, together=self.together)

    def publish_(self) -> None:
        """Report that this rank's parameters have been written.

        All-gathers start in the call for the last buffer of the step, or, if they overlap with the forward, before the
        modules that use the parameters.
        """
        self.sync.publish(self.memory, together=self.together)
