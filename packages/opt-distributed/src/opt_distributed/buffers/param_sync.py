"""When updated parameters are gathered: in the step, or in the background and awaited by the modules that use them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.buffers.wire import InFlight
from opt_distributed.comm.collectives import Comm
from opt_paramgroups import ParamId


class Gathers(Enum):
    """When a rank sees the parameters that other ranks have updated."""

    IN_STEP = auto()  # when `publish` returns
    BEFORE_USE = auto()  # before a module that holds one of them runs; `wait` before anybody else reads them


class ParamBucket:
    """One bucket of a sharded parameter buffer, which a gather completes in place."""

    def __init__(self, memory: ParamAndGradBuffer, index: int, comm: Comm):
        self.memory, self.index, self.comm = memory, index, comm
        self.ids = tuple(slot.id for slot in memory.layout.buckets[index].slots)
        self._flight: InFlight | None = None

    def start(self) -> None:
        """Starts the gather; waits for one that is under way."""
        self.wait()
        self._flight = self.memory.start_gather(self.index, self.comm)

    def wait(self) -> None:
        """Returns once the parameters are complete.

        Raises:
            CollectiveError: the gather failed, or ran into the group's timeout.
        """
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.finish()


class ParamSync:
    """Gathers the buckets of one model chunk in the order of their use.

    A step publishes the buffers it writes one by one; their gathers start with the last of them, inside the step, so
    that their order follows their use rather than their buffers. All start at once: they land in the buffer itself, so
    early ones cost no memory, the next bucket travels while this one computes, and no rank can start a gather late
    because its forward took another path.
    """

    def __init__(self, buckets: Sequence[ParamBucket], *, gathers: Gathers):
        self.buckets = tuple(buckets)
        self.gathers = gathers
        self.order: Sequence[int] = range(len(self.buckets))  # positions in `buckets`, first used first
        self._published: set[int] = set()  # buffers, by identity of their memory
        self._bucket_of = {id: bucket for bucket in self.buckets for id in bucket.ids}

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParamSync":
        """Waits for nothing: a copy of the model, such as a moving average, has parameters in memory of their own."""
        return ParamSync((), gathers=Gathers.IN_STEP)

    def publish(self, memory: ParamAndGradBuffer, *, together: Collection[ParamAndGradBuffer]) -> None:
        """Reports that this rank's shards of a buffer have been written; with the last of `together`, gathers start."""
        self._published.add(id(memory))
        if self._published >= {id(one) for one in together}:
            self._start_published()
            if self.gathers is Gathers.IN_STEP:
                self.wait()

    def start(self) -> None:
        """Starts the gather of every bucket."""
        self._start({id(bucket.memory) for bucket in self.buckets})

    def wait(self) -> None:
        """Returns once every parameter is complete; starts the gathers of buffers that were published alone."""
        self._start_published()
        for bucket in self.buckets:
            bucket.wait()

    def _start_published(self) -> None:
        if self._published:
            self._start(self._published)

    def _start(self, memories: Collection[int]) -> None:
        started = [self.buckets[index] for index in self.order if id(self.buckets[index].memory) in memories]
        self._published = set()
        for bucket in started:
            bucket.start()

    def wait_for(self, ids: Iterable[ParamId]) -> None:
        """Returns once these parameters are complete; starts the gathers of buffers that were published alone."""
        self._start_published()
        for id in ids:
            if id in self._bucket_of:
                self._bucket_of[id].wait()


class UseHooks:
    """Makes every module wait for its own parameters before it runs.

    A parameter may also be read by a module that does not hold it: attention blocks read their projections' weights and
    never call them. What no module of its own asked for in the first forward is waited for before the whole model runs.
    A module's state dict waits, too, and so does a load, of the wrapped model or of a part of it: what is still on its
    way would be missing in the one, and overwrite the other.
    """

    def __init__(self, model: nn.Module, ids: Mapping[nn.Parameter, ParamId], sync: ParamSync):
        self._sync = sync
        self._unseen: set[ParamId] = set(ids.values())
        self._handles: list[RemovableHandle] = [model.register_forward_pre_hook(self._before_model)]
        for module in model.modules():
            own = [ids[param] for param in module.parameters(recurse=False) if param in ids]
            if own:
                self._handles.append(module.register_forward_pre_hook(partial(self._before, own)))
                waits = partial(self._before_state, own)
                self._handles.append(module.register_state_dict_pre_hook(waits))  # type: ignore[no-untyped-call]
                self._handles.append(module.register_load_state_dict_pre_hook(waits))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Takes the hooks off again."""
        for handle in self._handles:
            handle.remove()

    def _before_model(self, model: nn.Module, args: Any) -> None:
        self._sync.wait_for(self._unseen)

    def _before(self, own: Collection[ParamId], module: nn.Module, args: Any) -> None:
        self._unseen.difference_update(own)
        self._sync.wait_for(own)

    def _before_state(self, own: Collection[ParamId], module: nn.Module, *args: Any) -> None:
        self._sync.wait_for(own)
