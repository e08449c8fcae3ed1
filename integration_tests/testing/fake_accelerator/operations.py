"""A dispatch mode that queues the operations of torch: they return at once and run later."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from fake_accelerator.graphs import CaptureError, Recording
from fake_accelerator.memory import Memory, poison_
from fake_accelerator.queues import Queue, Task

_ATEN = torch.ops.aten
_READS = {
    *(_ATEN._local_scalar_dense, _ATEN.equal, _ATEN.allclose, _ATEN.is_nonzero),
    *(_ATEN.nonzero, _ATEN.masked_select),
}


class HostReadError(RuntimeError):
    """The host waits for the device where it must not, or an operation mixes host and device memory."""


class _Kind(Enum):
    READS = auto()  # returns values, or shapes that depend on values: the host waits
    VIEWS = auto()  # returns views
    WRITES = auto()  # writes to arguments
    MAKES = auto()  # returns new tensors


@cache
def _kind(func: Any) -> _Kind:
    if func.overloadpacket in _READS:
        return _Kind.READS
    schema = func._schema
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments):
        return _Kind.WRITES
    if any(returned.alias_info is not None for returned in schema.returns):
        return _Kind.VIEWS
    return _Kind.MAKES


@cache
def _is_composite(func: Any) -> bool:
    """Whether `func` is made of other operations, such as `to`, which returns a view or a copy.

    Torch takes it apart itself, except in the `__torch_dispatch__` of a tensor subclass.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


class Deferring(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Queues every operation to the current stream of one rank.

    Each operation that makes new tensors runs twice: once at once, for the shapes, after which the results are
    overwritten with garbage, and again when it is its turn in the queue, for the values. So no operation needs code of
    its own here. Random numbers are those of the first run, because generators advance on the host.
    """

    def __init__(self, memory: Memory, current: Callable[[], Queue]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        self._current = current
        self.forbids_reads = False
        self.is_on_host = False  # whether tensors that are computed from no other tensor are in host memory
        self.recording: Recording | None = None  # while a graph is captured

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        if any(map(is_traceable_wrapper_subclass, tensors)):
            return NotImplemented  # the subclass runs its own operations on what it holds, which come here one by one
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        kind = _kind(func)
        on_host = [self.memory.is_on_host(tensor) for tensor in tensors]
        if func.overloadpacket is _ATEN.lift_fresh:  # what `torch.tensor` has made
            self.memory.allocated(args[0], self._current(), on_host=self.is_on_host)
        if kind is _Kind.VIEWS:
            return func(*args, **kwargs)
        if all(on_host) and (tensors or self.is_on_host):
            return self._computed_on_host(func, args, kwargs)
        if any(on_host) and func.overloadpacket is not _ATEN.copy_:
            raise HostReadError(f"{func} mixes memory of the host and of the device")
        if kind is _Kind.READS:
            self.read(str(func))
            return func(*args, **kwargs)
        if kind is _Kind.MAKES:
            return self._make(func, args, kwargs)
        self.queue(str(func), lambda *given: func(*given[0], **given[1]), (args, kwargs))
        if func.overloadpacket is _ATEN.copy_ and any(on_host) and not (args[2:3] or (kwargs.get("non_blocking"),))[0]:
            self.read(str(func))
        return _written(func, args, kwargs)

    def read(self, what: str) -> None:
        """Make the host wait for the current stream.

        Raises:
            CaptureError: a graph is being captured.
            HostReadError: host reads are forbidden.
        """
        if self.recording is not None:
            raise CaptureError(f"{what} waits for the device while a graph is captured")
        if self.forbids_reads:
            raise HostReadError(f"{what} waits for the device")
        self._current().synchronize()

    def queue(self, name: str, run: Callable[..., object], given: Any, *, on: Queue | None = None) -> None:
        """Queue `run(*given)` to a stream, with aliases of all tensors in `given`.

        While a graph is captured, record it instead, so that each replay queues it.
        """
        if self.recording is not None:
            self.record(name, lambda held: self.queue(name, run, held, on=on), given)
            return
        queue = on or self._current()
        task = self.task(name, run, given)
        queue.push(task)
        queue.world.go_on(queue.rank)

    def record(self, name: str, call: Callable[[Any], object], given: Any) -> None:
        """Let each replay of the graph that is being captured make `call(given)`."""
        assert self.recording is not None
        held = _mapped(lambda tensor: tensor.data, given)  # metadata stays as it is now
        self.recording.add(name, lambda: call(held), _tensors(held))

    def task(self, name: str, run: Callable[..., object], given: Any) -> Task:
        """The task that `queue` queues."""
        self.memory.overwrite_dropped()
        used: list[Tensor] = []

        def use(tensor: Tensor) -> Tensor:
            used.append(self.memory.use(tensor))
            return used[-1]

        held = _mapped(use, given)

        def work() -> None:
            run(*held)
            self.memory.done(used)

        return Task(name, work, seconds=self._current().world.rates(name, given))

    def _computed_on_host(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        made = func(*args, **kwargs)
        for one in _new(made, (args, kwargs)):
            self.memory.allocated(one, self._current(), on_host=True)
        return made

    def _make(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        made = func(*args, **kwargs)
        new = _new(made, (args, kwargs))
        if self.recording is not None:
            self.recording.made.update(self.memory.key(one) for one in new)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        drawn = [one.clone() for one in new] if is_random else []
        for one in new:
            self.memory.allocated(one, self._current())
            poison_(one)
        if is_random:
            if self.recording is not None:
                raise CaptureError(f"{func} draws random numbers while a graph is captured")
            self.queue(str(func), lambda targets: torch._foreach_copy_(targets, drawn), (new,))
        elif new and not func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            self.queue(str(func), _write_again, (func, args, kwargs, new))
        return made


def _new(made: Any, given: Any) -> list[Tensor]:
    """The tensors in `made` whose memory none of `given` has."""
    memory = {one.untyped_storage()._cdata for one in _tensors(given)}
    return [one for one in _tensors(made) if one.untyped_storage()._cdata not in memory]


def _tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts. torch's pytree takes as long as everything else here together."""
    found: list[Tensor] = []
    _mapped(found.append, tree)
    return found


def _mapped(of: Callable[[Tensor], object], tree: Any) -> Any:
    """`tree` with `of(x)` in place of each tensor x."""
    if isinstance(tree, Tensor):
        return of(tree)
    if isinstance(tree, list | tuple):
        return [_mapped(of, one) for one in tree]
    return {name: _mapped(of, one) for name, one in tree.items()} if isinstance(tree, dict) else tree


def _write_again(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Tensor]) -> None:
    for target, value in zip(targets, _tensors(func(*args, **kwargs)), strict=True):
        target.copy_(value)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The return value of an operation that writes to arguments: those arguments, in the order of its schema."""
    schema = func._schema
    by_alias: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            by_alias.update(dict.fromkeys(argument.alias_info.before_set, given))
    if any(returned.alias_info is None for returned in schema.returns):
        raise NotImplementedError(f"{func} writes to arguments and makes new tensors")
    returned = [by_alias[name] for one in schema.returns for name in one.alias_info.before_set]
    return returned[0] if len(returned) == 1 else tuple(returned) if returned else None
