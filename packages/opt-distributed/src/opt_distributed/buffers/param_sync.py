"""`ParamSync`: gathers updated parameters in the step, or in the background until they are read.

With `align_param_gather`, a pipeline's schedule starts the gathers, in one order on all ranks (`gather_order`).
Megatron-Core's schedules call `start_param_sync` of a chunk at the same time on all pipeline stages, so that no stage
waits for another one that is slowed by a gather. The first request, by a schedule, a read of a parameter or a
reduction, starts the pending gathers of all chunks up to the requested one, in ascending order of the chunks. All
replicas start each gather once in each step, before they reduce gradients again. So their collectives match although
requests come at different times.
"""

from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from enum import Enum, auto
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.buffers.wires import CollectiveError, InFlight
from opt_distributed.comm.collectives import Comm
from opt_paramgroups import ParamId


def share_gather_order(chunks: Iterable["ParamSync"]) -> None:
    """Give one order of gathers to `chunks` and to all chunks that share an order with one of them."""
    linked = {other for chunk in chunks for other in chunk.gather_order}
    order = tuple(sorted(linked, key=lambda chunk: chunk.number))
    for chunk in order:
        chunk.gather_order = order


class Gathers(Enum):
    """When a rank receives the parameters that other ranks have updated."""

    IN_STEP = auto()  # when `publish` returns
    BEFORE_USE = auto()  # before they are read (`UseHooks`)
    WHEN_ASKED = auto()  # before they are read; gathers start when a schedule requests them, or at the first read


class ParamBucket(NamedTuple):
    """One bucket of a sharded parameter buffer."""

    memory: ParamAndGradBuffer
    number: int
    comm: Comm

    @property
    def ids(self) -> set[ParamId]:
        """The parameters in the bucket."""
        return {slot.id for slot in self.memory.layout.buckets[self.number].slots}


class ParamSync:
    """Gathers the buckets of one model chunk in the order of their use.

    A step publishes the buffers that it writes one by one. Gathers start inside the step, when the last of these is
    published, so that they follow the order of use across buffers. All start at once: they write to the buffer itself,
    so that early ones need no memory; later buckets are gathered while earlier ones are used; and no rank can start a
    gather late because its forward took another path. With `Gathers.WHEN_ASKED` they start later: see `gather_order`.
    """

    def __init__(self, buckets: Sequence[ParamBucket], *, number: int = 0):
        self.buckets = tuple(buckets)
        self.gathers = Gathers.IN_STEP
        self.number = number  # of the chunk
        self.order: Sequence[int] = range(len(self.buckets))  # indices in `buckets`, in the order of use
        self._published: set[ParamAndGradBuffer] = set()
        self._left: dict[ParamBucket, set[ParamId]] | None = None  # before each gather, while a step updates and sends
        self.is_pending = False  # whether a parameter may be incomplete; read by compiled code, so a plain attribute
        self._incomplete: dict[ParamBucket, InFlight | CollectiveError] = {}  # gathers that are pending or have failed
        # By identity of the parameter, because tensors compare elementwise.
        self._bucket_of = {id(bucket.memory.params[name]): bucket for bucket in self.buckets for name in bucket.ids}
        self.gather_order: tuple[ParamSync, ...] = (self,)  # the chunks of the model

    def publish(self, memory: ParamAndGradBuffer, *, together: Set[ParamAndGradBuffer]) -> None:
        """Report that this rank's shards of a buffer were written. Gathers start with the last buffer of `together`."""
        self._published.add(memory)
        self.is_pending = True
        if self.gathers is not Gathers.WHEN_ASKED and self._published >= together:
            due = self._due(self._published) if self._left is None else list(self._left)
            self._left = None
            self._published = set()
            self._start(due)
            for bucket in list(self._incomplete) if self.gathers is Gathers.IN_STEP else ():
                self._wait_for(bucket)

    @contextmanager
    def sending(
        self, memory: ParamAndGradBuffer, ids: Collection[ParamId], *, together: Set[ParamAndGradBuffer]
    ) -> Iterator[Sequence[int]]:
        """While this rank updates `ids`, start gathers in their order, if `memory` is written last of `together`. Give
        the numbers of its buckets in this order; none if all start when it is published. After an error, none count.
        """
        self._left = None
        if not ids or self.gathers is Gathers.WHEN_ASKED or not self._published | {memory} >= together:
            yield ()
            return
        self._left = {bucket: bucket.ids.intersection(ids) for bucket in self._due(together)}
        try:
            yield [bucket.number for bucket in self._left if bucket.memory is memory]
        except (Exception, KeyboardInterrupt):  # not if the generator is dropped, as late as in another step
            self._left = None
            raise

    def updated(self, ids: Collection[ParamId]) -> None:
        """Start the gathers that wait for no other parameters of this rank."""
        assert self._left is not None
        for left in self._left.values():
            left.difference_update(ids)
        while self._left and not next(iter(self._left.values())):
            due = list(self._left)
            del self._left[due[0]]
            self._start(due, number=1)

    def start(self) -> None:
        """Start the gather of every bucket."""
        self._start([self.buckets[index] for index in self.order])

    def start_asked(self) -> None:
        """With `Gathers.WHEN_ASKED`: start the pending gathers of this chunk and of chunks before it."""
        for chunk in self.gather_order[: self.gather_order.index(self) + 1]:
            chunk.start_due()

    def start_all(self) -> None:
        """Start the pending gathers of all chunks of the model."""
        self.gather_order[-1].start_asked()

    def wait(self) -> None:
        """Start pending gathers, and wait until every parameter is complete."""
        self._wait_for_all(self.buckets)

    def wait_for(self, params: Iterable[nn.Parameter | None]) -> None:
        """Start pending gathers, and wait until these parameters are complete."""
        found = (self._bucket_of.get(id(param)) for param in params)
        self._wait_for_all(bucket for bucket in found if bucket is not None)

    def start_due(self) -> None:
        """Start the gathers of buffers that were published; none while the step starts them, which a read must not
        anticipate."""
        if self._published and self._left is None:
            due = self._due(self._published)
            self._published = set()
            self._start(due)

    def _wait_for_all(self, buckets: Iterable[ParamBucket]) -> None:
        if self.gathers is Gathers.WHEN_ASKED:
            self.start_asked()
        else:
            self.start_due()
        for bucket in buckets:
            if bucket in self._incomplete:
                self._wait_for(bucket)
                bucket.memory.check_arrived(bucket.number)

    def _due(self, memories: Collection[ParamAndGradBuffer]) -> list[ParamBucket]:
        return [bucket for index in self.order if (bucket := self.buckets[index]).memory in memories]

    def _start(self, due: Sequence[ParamBucket], *, number: int | None = None) -> None:
        """Start the gathers of `due`, or the first `number`. If one fails, all later buckets are incomplete, too."""
        for place, bucket in enumerate(due[:number]):
            with suppress(CollectiveError):  # what failed is gathered again
                self._wait_for(bucket)
            try:
                self._incomplete[bucket] = bucket.memory.start_gather(bucket.number, bucket.comm)
            except CollectiveError as error:
                self._incomplete |= dict.fromkeys(due[place:], error)  # shards of other ranks are out of date in these
                self.is_pending = True
                raise
        self.is_pending = bool(self._incomplete)

    def _wait_for(self, bucket: ParamBucket) -> None:
        """Wait for a bucket. A gather that has failed raises its error in every wait, until it is started again."""
        found = self._incomplete.get(bucket)
        if isinstance(found, CollectiveError):
            raise found
        if found is not None:
            try:
                found.finish()
            except CollectiveError as error:
                self._incomplete[bucket] = error
                raise
            del self._incomplete[bucket]
            self.is_pending = bool(self._incomplete)


# Modules, state dicts, copies, moving averages and saves all read a parameter through the `_parameters` of the module
# that holds it. While gathers overlap with the forward, `AwaitedParams` replaces these dicts, so that readers need not
# be known in advance. Two kinds of readers bypass it: code that torch.compile has compiled, and modules that keep
# parameters in other attributes (`nn.LSTM._flat_weights`). For these, blocks wait before they run.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


class _Awaited(dict[str, Any]):
    """A dict whose reads wait. Copies and pickles are plain dicts."""

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)


class AwaitedParams(_Awaited):
    """A module's `_parameters`, whose reads wait until the values have arrived."""

    def __init__(self, params: Mapping[str, Any], sync: ParamSync):
        super().__init__(params)
        self._sync = sync

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if not torch.compiler.is_compiling() and self._sync.is_pending:
            self._sync.wait_for((param,))
        return param

    def items(self) -> Any:
        self._wait()
        return super().items()

    def values(self) -> Any:
        self._wait()
        return super().values()

    def _wait(self) -> None:
        if not torch.compiler.is_compiling() and self._sync.is_pending:
            self._sync.wait_for(super().values())


class AwaitedGroup(_Awaited):
    """A parameter group, in which a read of `params` waits until the values have arrived; reads of other entries do
    not. `stored_params` does not wait, either."""

    def __init__(self, group: Mapping[str, Any], syncs: Iterable[ParamSync]):
        super().__init__(group)
        self._syncs = tuple(syncs)

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if name == "params" and not torch.compiler.is_compiling():
            for sync in self._syncs:
                if sync.is_pending:
                    sync.wait_for(value)
        return value

    def __iter__(self) -> Iterator[str]:
        """Defined so that `dict(group)` and `{**group}` read entries by `__getitem__`."""
        return super().__iter__()

    def items(self) -> Any:
        return dict(self).items()

    def values(self) -> Any:
        return dict(self).values()


def stored_params(group: Mapping[str, Any]) -> Any:
    """The `params` of a group, whose values may not have arrived."""
    return dict.__getitem__(group, "params") if isinstance(group, dict) else group["params"]


class UseHooks:
    """Makes every read of a model's parameters wait for them, until `remove`.

    Compiled regions cannot wait, so modules wait before they run: a block for its own parameters, which keeps the
    overlap if blocks are compiled, and a module above the blocks, if it is compiled itself, for everything below it.
    Blocks are the elements of the outermost `ModuleList`, `ModuleDict` and `Sequential`, other modules that contain
    none of these, and modules that were compiled before.
    """

    def __init__(self, model: nn.Module, sync: ParamSync):
        self._gated = [module for module in model.modules() if vars(module).get("_parameters")]
        for module in self._gated:
            module._parameters = AwaitedParams(module._parameters, sync)
        self._handles: list[RemovableHandle] = []
        for module, is_block in _with_blocks(model):
            elsewhere = (param for inner in module.modules() for param in _held_elsewhere(inner))
            below = list(dict.fromkeys([*module.parameters(), *elsewhere]))
            first = below if is_block else list(_held_elsewhere(module))
            self._handles.append(module.register_forward_pre_hook(_Wait(sync, first, below)))

    def remove(self) -> None:
        """Restores the modules."""
        for handle in self._handles:
            handle.remove()
        for module in self._gated:
            if isinstance(module._parameters, AwaitedParams):
                module._parameters = dict.copy(module._parameters)  # does not wait for gathers


class _Wait:
    """A forward pre-hook. Its copies and pickles do nothing, because a copied model has its own memory."""

    def __init__(self, sync: ParamSync, first: Collection[nn.Parameter], below: Collection[nn.Parameter]):
        self._sync = sync
        self._first = first
        self._below = below

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._sync.is_pending:
            self._wait(is_compiled=torch.compiler.is_compiling() or _compiles_frames())

    def __reduce__(self) -> Any:
        return _no_hook, ()

    @_disable_dynamo  # `torch.compiler.disable` would load dynamo when this is imported
    def _wait(self, *, is_compiled: bool) -> None:
        self._sync.wait_for(self._below if is_compiled else self._first)


def _compiles_frames() -> bool:
    """Whether code that is called from here will be compiled, although this is not: dynamo leaves a frame without
    tensors, such as a hook, to Python."""
    callback = set_eval_frame(None)
    set_eval_frame(callback)
    return callback is not None


def _no_hook() -> Any:
    return _ignore


def _ignore(module: nn.Module, args: Any) -> None:
    return None


def _with_blocks(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Modules that wait before they run, and whether they are blocks."""
    is_compiled = isinstance(model, torch._dynamo.OptimizedModule)
    if is_compiled or not any(isinstance(below, _CONTAINERS) for below in model.modules()):
        yield model, True
        return
    yield model, False
    for child in model.children():
        if isinstance(model, _CONTAINERS) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child, True
        else:
            yield from _with_blocks(child)


def _held_elsewhere(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters in attributes of a module other than its registered parameters and modules."""
    for name, value in vars(module).items():
        if name not in _REGISTRIES:
            yield from _params_in(value, module)


def _params_in(value: Any, holder: nn.Module, *, depth: int = 3) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, nn.Module):
        if value is not holder:  # a patched forward may hold its module, whose parameters wait when they are read
            yield from value.parameters()
    elif depth:
        for inner in _contents(value):
            yield from _params_in(inner, holder, depth=depth - 1)


def _contents(value: Any) -> Iterable[Any]:
    """What a container holds, a namespace, a dataclass, a partial or a function; nothing for other objects, which may
    lead to the whole model, as a trainer does."""
    if isinstance(value, list | tuple | set):
        return value
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, SimpleNamespace | Namespace):
        return vars(value).values()
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, FunctionType):
        return _captured(value)
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in fields(value)]
    return ()


def _captured(function: FunctionType) -> Iterator[Any]:
    """The values of a function's closure and of its defaults."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the variable has no value yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
