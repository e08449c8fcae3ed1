"""Ranks as threads, each with a device that runs work later, and collectives with the semantics of NCCL."""

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fake_accelerator.graphs import CaptureError, DeferredGraph
from fake_accelerator.memory import AtOnce, Memory, poison_
from fake_accelerator.operations import Deferring
from fake_accelerator.queues import Event, Meeting, Queue, Rates, Stopped, World
from opt_distributed.comm import Comm, Op
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import Pending, Sizes
from opt_distributed.comm.device import Graph

_rank = threading.local()  # the device of this thread's rank


class CapturedStream:
    """All streams of a capture, and the events on them: a replay queues the work in the order in which it was recorded,
    one of those that forks and joins allow."""

    def record_event(self) -> "CapturedStream":
        return self

    def wait_event(self, event: Any) -> None:
        if event is not self:
            raise CaptureError("a wait for an event that was recorded before the capture")

    def synchronize(self) -> None:
        raise CaptureError("a wait of the host while a graph is captured")


CAPTURED = CapturedStream()


class DeferredDevice(devices.Device):
    """The `Device` of one rank."""

    is_asynchronous = True
    has_graphs = True

    def __init__(self, world: World, rank: int):
        super().__init__()
        self.world = world
        self.rank = rank
        self._compute = Queue(world, rank, "compute")
        self._side = Queue(world, rank, "side")
        self._current = self._compute
        self.memory = Memory(self._compute)
        self.mode = Deferring(self.memory, lambda: self._current)

    def current_stream(self) -> Any:
        return self._current if self.mode.recording is None else CAPTURED

    def side_stream(self) -> Any:
        return self._side if self.mode.recording is None else CAPTURED

    def graph(self) -> Graph:
        return DeferredGraph(self.mode)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before = self._current
        self._current = before if stream is CAPTURED else stream
        try:
            yield
        finally:
            self._current = before

    def reaches(self, event: Any, *, within: float) -> bool:
        # No work runs here: the garbage collector may ask in the middle of a task.
        return bool(event.is_complete)

    def pinned_like(self, tensor: Tensor) -> Tensor:
        self._check_not_capturing("a copy to the host")
        with AtOnce():
            pinned = torch.empty_like(tensor)
            poison_(pinned)
        self.memory.allocated(pinned, self._compute, on_host=True)
        return pinned

    def host_empty(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        with AtOnce():
            empty = torch.empty(numel, dtype=dtype)
        return self.pinned_like(empty)

    def upload(self, tensor: Tensor) -> Tensor:
        self._check_not_capturing("a copy from the host")
        if self.holds(tensor):
            return tensor
        with AtOnce():
            source = tensor.clone()  # torch's pinned-memory allocator keeps it until the copy has run
        uploaded = torch.empty_like(source)
        self.mode.queue("upload", lambda target: target.copy_(source), (uploaded,))
        return uploaded

    def to_host(self, tensor: Tensor) -> Tensor:
        return self.pinned_like(tensor).copy_(tensor) if self.holds(tensor) else tensor

    def holds(self, tensor: Tensor) -> bool:
        return not self.memory.is_on_host(tensor)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        before = self.mode.is_on_host
        self.mode.is_on_host = True
        try:
            yield
        finally:
            self.mode.is_on_host = before

    def release_(self, tensor: Tensor) -> None:
        self._check_not_capturing("memory that is given back")
        self.memory.release(tensor)

    def reclaim_(self, tensor: Tensor) -> None:
        self.memory.allocated(tensor, self._current)
        self.mode.queue("uninitialised memory", poison_, (tensor,))

    @contextmanager
    def host_reads_forbidden(self) -> Iterator[None]:
        """Raise `HostReadError` if the host reads a tensor, or waits for a copy of one.

        Waiting for events is allowed: that is how a copy that was started earlier is read.
        """
        self.mode.forbids_reads = True
        try:
            yield
        finally:
            self.mode.forbids_reads = False

    def _check_not_capturing(self, what: str) -> None:
        if self.mode.recording is not None:
            raise CaptureError(f"{what} while a graph is captured")

    def seconds(self) -> float:
        """Wait for everything that this rank has queued, and read the clock."""
        self.synchronize()
        return max(queue.ends[-1] for queue in self.world.queues if queue.rank == self.rank)

    def synchronize(self) -> None:
        """Return once everything that this rank has queued has run."""
        queues = [queue for queue in self.world.queues if queue.rank == self.rank]
        self.world.block_until(lambda: not any(queue.tasks for queue in queues), self.rank)


class _Group:
    """The shared state of the ranks of a process group."""

    def __init__(self, ranks: Sequence[int]):
        self.ranks = tuple(ranks)
        self.meetings: dict[int, Meeting] = {}
        self.exchanges: dict[int, dict[int, Any]] = {}


class DeferredPending:
    """A collective that was queued. Its tensors are kept until `wait`. Without an event, it was captured."""

    def __init__(self, done: Event | None, device: DeferredDevice, tensors: Sequence[Tensor]):
        self._done = done
        self._device = device
        self._tensors = tensors

    def wait(self) -> None:
        """Make the current stream wait; the host continues."""
        if self._done is not None:  # else the replay waits
            self._device.current_stream().wait_event(self._done)
        self._tensors = ()


class DeferredComm:
    """One rank's view of a group, with a stream of its own, as NCCL has."""

    def __init__(self, group: _Group, device: DeferredDevice):
        self._group = group
        self.device = device
        self.rank = group.ranks.index(device.rank)
        self.size = len(group.ranks)
        self._queue = Queue(device.world, device.rank, f"collectives of {group.ranks}")
        self._num_calls = self._num_exchanges = 0

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        return self._start(f"all_reduce {op.name}", partial(_all_reduce, op), (x,), async_op)

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        return self._start("reduce_scatter", _reduce_scatter, (shard, full), async_op)

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        return self._start("all_gather", _all_gather, (full, shard), async_op)

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        sent = [x.numel() // self.size] * self.size if sizes is None else list(sizes.sent)
        return self._start("all_to_all", _all_to_all, (out, x, sent), async_op)

    def broadcast_(self, x: Tensor, *, src: int = 0) -> None:
        self._start("broadcast", _broadcast, (x, src), False)

    def gather_objects(self, value: Any) -> list[Any]:
        if self.device.mode.recording is not None:
            raise CaptureError("an exchange of objects while a graph is captured")
        values = self._group.exchanges.setdefault(self._num_exchanges, {})
        self._num_exchanges += 1
        values[self.rank] = value
        self.device.world.moved()
        self.device.world.block_until(lambda: len(values) == self.size, self.device.rank)
        return [values[rank] for rank in range(self.size)]

    allocate = staticmethod(Comm.allocate)  # torch's own memory, which may be freed

    def _start(self, kind: str, run: Callable[[list[Any]], None], given: tuple[Any, ...], async_op: bool) -> Pending:
        """Queue this rank's part. All parts run together once each is at the head of its stream."""
        if self.device.mode.recording is not None:
            self.device.mode.record(kind, lambda held: self._start(kind, run, held, False).wait(), given)
            return DeferredPending(None, self.device, ())
        number = self._num_calls
        self._num_calls = self._num_calls + 1
        meeting = self._group.meetings.setdefault(number, Meeting(kind, self.size, run))
        if meeting.kind != kind:
            raise RuntimeError(f"collective {number} is {kind} on rank {self.rank} and {meeting.kind} on another")
        task = self.device.mode.task(kind, lambda *held: meeting.payloads.__setitem__(self.rank, held), given)
        begun = self.device.current_stream().record_event()
        task.after = (begun,)
        task.meeting = meeting
        meeting.members.append((self._queue, task))
        self._queue.push(task)
        pending = DeferredPending(self._queue.record_event(), self.device, [x for x in given if isinstance(x, Tensor)])
        if not async_op:
            pending.wait()
        self.device.world.go_on(self.device.rank)
        return pending


class DeferredRank:
    """The argument of a rank's program: its device and its collectives."""

    def __init__(self, world: World, rank: int, groups: dict[tuple[int, ...], _Group]):
        self.device = DeferredDevice(world, rank)
        self.rank = rank
        self.size = world.size
        self._groups = groups
        self._comms: dict[tuple[int, ...], DeferredComm] = {}
        self.comm = self.comm_over(range(world.size))

    def comm_over(self, ranks: Sequence[int]) -> DeferredComm:
        """The group of these ranks, which include this one."""
        key = tuple(ranks)
        if key not in self._comms:
            self._comms[key] = DeferredComm(self._groups.setdefault(key, _Group(key)), self.device)
        return self._comms[key]


def run_deferred(
    size: int,
    rank_main: Callable[[DeferredRank], Any],
    *,
    seed: int,
    eagerness: float | None = None,
    rates: Rates = lambda name, given: 0.0,
) -> list[Any]:
    """Run `rank_main` once per rank, on devices that run their work later, in an order that `seed` determines.

    Returns the results in rank order, once all work has run. All tensors are on the device, except those of
    `Device.pinned_like` and `host_empty`, those computed from these alone, and those made inside `Device.on_host`.
    `eagerness` is the probability that queued work runs before the host continues, drawn at random if it is not given;
    at 1, work runs as soon as it can. `rates` are those of the clock that `DeferredDevice.seconds` reads.

    Raises:
        The first rank's error.
        DeadlockError: all ranks wait, for collectives that another rank never calls or in another order.
    """
    world = World(size, seed=seed, eagerness=eagerness, at_once=AtOnce, rates=rates)
    groups: dict[tuple[int, ...], _Group] = {}
    ranks = [DeferredRank(world, rank, groups) for rank in range(size)]
    results: list[Any] = [None] * size
    errors: dict[int, BaseException] = {}

    def run(one: DeferredRank) -> None:
        _rank.device = one.device
        try:
            world.wait_for_turn(one.rank)
            with one.device.mode:
                results[one.rank] = rank_main(one)
            one.device.synchronize()
        except BaseException as error:
            errors[one.rank] = error
        finally:
            world.end(one.rank, failed=one.rank in errors)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in ranks]
    with _patched(), _without_collections():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    raised = [errors[rank] for rank in sorted(errors)]
    for error in [error for error in raised if not _is_consequence(error)] or raised:
        raise error
    return results


def _is_consequence(error: BaseException | None) -> bool:
    """Whether it was raised because another rank failed."""
    return error is not None and (isinstance(error, Stopped) or _is_consequence(error.__cause__))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep the garbage collector from running finalizers in the middle of a task, at a moment that no seed determines.

    A finalizer that reads a tensor queues and runs work.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _patched() -> Iterator[None]:
    """Replace `device_of` by the rank's device, and let host reads that torch does not dispatch wait as others do."""
    reads = {name: _waiting(getattr(Tensor, name)) for name in ("tolist", "numpy")}
    with patch.object(devices, "device_of", lambda device: _rank.device), patch.multiple(Tensor, **reads):
        yield


def _waiting(read: Callable[..., Any]) -> Callable[..., Any]:
    def read_when_done(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        device: DeferredDevice | None = getattr(_rank, "device", None)
        if device is not None and not device.memory.is_on_host(tensor):
            device.mode.read(read.__name__)
        return read(tensor, *args, **kwargs)

    return read_when_done


def _copy(targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


# What a collective does once all ranks have come, with the tensors that each gave.


def _all_reduce(op: Op, parts: list[Any]) -> None:
    stacked = torch.stack([x for (x,) in parts])
    _copy((x for (x,) in parts), [stacked.sum(0) if op is Op.SUM else stacked.amax(0)] * len(parts))


def _reduce_scatter(parts: list[Any]) -> None:
    total = torch.stack([full for _, full in parts]).sum(0).chunk(len(parts))
    for _, full in parts:
        poison_(full)  # undefined after a reduce-scatter
    _copy((shard for shard, _ in parts), total)


def _all_gather(parts: list[Any]) -> None:
    _copy((full for full, _ in parts), [torch.cat([shard for _, shard in parts])] * len(parts))


def _all_to_all(parts: list[Any]) -> None:
    sent = [torch.split(x.clone(), sizes) for _, x, sizes in parts]
    _copy((out for out, _, _ in parts), map(torch.cat, zip(*sent, strict=True)))


def _broadcast(parts: list[Any]) -> None:
    _copy((x for x, _ in parts), [parts[parts[0][1]][0].clone()] * len(parts))
