"""`Comm`, the collectives that steps and buffers use: over a process group, or in a world of one rank."""

import atexit
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from enum import Enum, auto
from functools import partial
from operator import methodcaller
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from opt_config import ConfigError
from opt_distributed.comm.device import Device
from opt_distributed.comm.notices import Left, Tells, at, board_of_world


class ProcessGroupError(ConfigError):
    """Process groups that are missing, unknown or contradictory."""


class Allocate(Protocol):
    """Allocates a buffer that collectives read and write; every rank of the group makes the same calls in one order.

    By default torch allocates them. `TorchComm(group, allocate=...)` uses memory of another kind: registered NCCL user
    buffers (a `torch.cuda.MemPool` over `ncclMemAlloc`), symmetric memory
    (`torch.distributed._symmetric_memory.empty`), or a custom pool.
    """

    def __call__(self, numel: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return (numel,) zeros, contiguous, in a storage of their own."""


def zeros(numel: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate with torch's own allocator."""
    return torch.zeros(numel, dtype=dtype, device=device)


Made = TypeVar("Made")


class Op(Enum):
    """The reduction of an all-reduce."""

    SUM = auto()
    MAX = auto()


class Pending(Protocol):
    """A collective that was started. `wait` returns once its result may be read; further calls return at once."""

    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        return None


DONE: Pending = _Done()


class Sizes(NamedTuple):
    """Elements of the parts of an `all_to_all_`, by rank, this rank included."""

    received: Sequence[int]  # parts of `out`, from each rank
    sent: Sequence[int]  # parts of `x`, to each rank


class Comm(Protocol):
    """One rank's view of a group of ranks. All ranks of the group make the same calls in the same order.

    Tensors are contiguous. In-place calls are allowed: `shard` may be this rank's part of `full`. With `async_op`, a
    call returns at once, and its tensors must not be used until `wait`. Without it, the collective is complete on
    return.
    """

    rank: int
    size: int
    allocate: Allocate = staticmethod(zeros)
    """Allocates buffers that collectives of this group read and write. Other memory than that of `zeros` may be
    registered, and must not be freed."""

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        """Reduce `x` over all ranks, in place."""

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        """Write to `shard` (n,) this rank's part of the sum of `full` (size * n,). Leaves `full` undefined."""

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        """Write to `full` (size * n,) the shards (n,) of all ranks, in rank order."""

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        """Write to part r of `out` the part of rank r's `x` for this rank. Parts are equal unless `sizes` is given."""

    def broadcast_(self, x: Tensor, *, src: int = 0) -> None:
        """Write to `x` on every rank its value on rank `src` of the group."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, in rank order. Values are small and picklable."""

    def part(self, ranks: Sequence[int]) -> "Comm":
        """Create the group of these ranks of this one, in ascending order, to which this rank belongs, with its backend
        and timeout. They all make the same calls in one order. Raises ProcessGroupError if it has no such groups."""
        raise ProcessGroupError(f"a {type(self).__name__} cannot be divided")


class Alone(Comm):
    """A world of one rank."""

    rank = 0
    size = 1

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        return DONE

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        return self.all_to_all_(shard, full)

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        return self.all_to_all_(full, shard)

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return DONE

    def broadcast_(self, x: Tensor, *, src: int = 0) -> None:
        return None

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


ALONE: Comm = Alone()

# torch 2.13 renamed the two flat collectives and deprecates the old names.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_OPS = {Op.SUM: dist.ReduceOp.SUM, Op.MAX: dist.ReduceOp.MAX}

# Let gloo's threads finish before the interpreter shuts down, so that scripts end with their exit status. When a gloo
# collective completes, the thread that ran it releases its tensors, which requires the GIL. Python unwinds a thread
# that requests the GIL during shutdown, and C++ then calls `terminate` ("terminate called without an active
# exception"). So a script that ends right after its last collective would abort now and then, even if it has destroyed
# its process groups: their threads live as long as anything refers to the groups. A script that ends while parameters
# are being gathered would also break the gathers of its peers.

FINISH_SECONDS = 5.0  # for pending collectives; one whose peer has died never completes
RELEASE_SECONDS = 0.1  # for gloo's threads to release the tensors of completed collectives; they need microseconds


class _Started:
    """A pending collective. It is kept alive until `wait` was called, even if nothing else refers to it."""

    under_way: ClassVar[set["_Started"]] = set()

    def __init__(self, work: Any, wait: Callable[[Any], object], then: Callable[[], object] | None):
        self.work = work
        self._wait = wait
        self._then = then
        self.under_way.add(self)

    def wait(self) -> object:
        result = self._wait(self.work)
        self.under_way.discard(self)  # not after an error: it may still be under way
        if self._then is not None:
            self._then()
            self._then = None
        return result


@atexit.register  # at import, so that hooks of scripts, which may destroy groups, run before
def _finish_collectives() -> None:
    if not TorchComm.is_used:
        return
    deadline = time.monotonic() + FINISH_SECONDS
    while time.monotonic() < deadline and not all(started.work.is_completed() for started in _Started.under_way):
        time.sleep(0.001)
    time.sleep(RELEASE_SECONDS)


class TorchComm(Comm, Tells):
    """A `torch.distributed` process group to which this rank belongs. `allocate` allocates its buffers.

    The host waits for collectives of host tensors, and learns from notices (`comm.notices`) if a peer will not come.
    """

    is_used: ClassVar[bool] = False  # in this process, by any group

    def __init__(self, group: dist.ProcessGroup, *, allocate: Allocate | None = None):
        TorchComm.is_used = True
        self.group = group
        if allocate is not None:  # else `zeros`, or what a subclass has
            self.allocate = allocate
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._board = board_of_world()
        self._members = dist.get_process_group_ranks(group)
        self._key = f"{group.group_name} of {crc32(repr(self._members).encode())}"
        self._board.launched.setdefault(self._key, 0)
        self._has_gloo = "cpu:gloo" in dist.get_backend_config(group)

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        return self._start(f"all_reduce {x.numel()}", x, async_op, dist.all_reduce, x, _OPS[op])

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        kind = f"reduce_scatter {full.numel()}"
        if not self._is_gloo(full):
            return self._start(kind, full, async_op, _reduce_scatter, shard, full)
        # With gloo, torch's own is an all-reduce of a copy, too, and has no wait with a timeout.
        part = full.view(self.size, -1)[self.rank]
        return self._start(kind, full, async_op, dist.all_reduce, full, then=lambda: shard.copy_(part))

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        return self._start(f"all_gather {full.numel()}", full, async_op, _all_gather, full, shard)

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        parts = () if sizes is None else (list(sizes.received), list(sizes.sent))
        return self._start("all_to_all", x, async_op, dist.all_to_all_single, out, x, *parts)

    def broadcast_(self, x: Tensor, *, src: int = 0) -> None:
        first = dist.get_global_rank(self.group, src)
        self._start(f"broadcast {x.numel()}", x, False, dist.broadcast, x, first)

    def gather_objects(self, value: Any) -> list[Any]:
        if not self._has_gloo:
            values: list[Any] = [None] * self.size
            dist.all_gather_object(values, value, group=self.group)
            return values
        # The same two collectives as in torch's, where the host would not read notices while it waits.
        pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([pickled.numel()], dtype=torch.int64, device="cpu"), "sizes of objects")
        sent = torch.zeros(int(max(sizes)), dtype=torch.uint8, device="cpu")
        sent[: pickled.numel()] = pickled
        received = self._gather(sent, "objects")
        return [pickle.loads(part[: int(size)].numpy().tobytes()) for part, size in zip(received, sizes, strict=True)]

    def tell(self, why: str, *, place: str = "") -> None:
        self._board.tell(Left(why, place))

    def part(self, ranks: Sequence[int]) -> Comm:
        group = dist.new_group(
            [self._members[rank] for rank in ranks],
            timeout=_timeout(self.group),
            backend=dist.get_backend_config(self.group),
            use_local_synchronization=True,  # only its members wait for each other
        )
        return TorchComm(group, allocate=self.allocate)

    def _is_gloo(self, x: Tensor) -> bool:
        """Whether gloo sends this tensor."""
        return self._has_gloo and x.device.type == "cpu"

    def _gather(self, sent: Tensor, what: str) -> list[Tensor]:
        """A tensor of every rank, all of one size."""
        received = [torch.empty_like(sent) for _ in range(self.size)]
        self._start(what, sent, False, dist.all_gather, received, sent)
        return received

    def _start(
        self,
        kind: str,
        x: Tensor,
        async_op: bool,
        call: Callable[..., Any],
        *arguments: Any,
        then: Callable[[], object] | None = None,
    ) -> Pending:
        """Start a collective; `kind` is equal on all ranks. Without `async_op`, complete it. `then` is called after it,
        in the first `wait`."""
        launch = self._board.launch(self._key, kind)
        is_watched = self._is_gloo(x)
        work = call(*arguments, group=self.group, async_op=async_op or is_watched)
        if work is None:
            return DONE
        wait = partial(self._board.wait, launch=launch, members=self._members) if is_watched else methodcaller("wait")
        started = _Started(work, wait, then)
        if async_op:
            return started
        started.wait()
        return DONE


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a group's collectives; None if its backend has no options."""
    backend: Any = group._get_backend(group._device_types[0])
    backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
    options = getattr(backend, "options", None)
    return None if options is None else cast(timedelta, options._timeout)


def comm_of(group: dist.ProcessGroup | None) -> Comm:
    """Return the `Comm` of a process group; None stands for a world of one rank."""
    return Alone() if group is None else TorchComm(group)


def group_of(comm: Comm) -> dist.ProcessGroup | None:
    """Return the process group of a `Comm`; None if it has none, as `Alone` and `ThreadComm`."""
    return comm.group if isinstance(comm, TorchComm) else None


def members(comm: Comm) -> list[int]:
    """Return the ranks of a `Comm` in the world; empty if it has no process group."""
    return dist.get_process_group_ranks(comm.group) if isinstance(comm, TorchComm) else []


@contextmanager
def telling(comms: Iterable[Comm], place: str = "", *, unless: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Tell the ranks of `comms` that wait for this one at `place`, or anywhere, of an error that is raised inside.

    Errors of type `unless` are raised by every rank, and are not posted. Withdraws the notice of an earlier error,
    because this rank goes on.
    """
    posting = [comm for comm in dict.fromkeys(comms) if isinstance(comm, Tells)]
    for comm in posting:
        comm.tell("")
    try:
        with at(place) if place else nullcontext():
            yield
    except Exception as error:
        if not isinstance(error, unless):
            for comm in posting:
                comm.tell(f"raised {type(error).__name__}: {error}", place=place)
        raise


def agreed(comm: Comm, make: Callable[[], Made]) -> Made:
    """Return `make()`, or raise on every rank if it raises on one. `make` must not call a collective."""
    try:
        made = make()
    except Exception as error:  # of any kind, because the other ranks wait in `agree`
        agree(comm, error)
        raise AssertionError("an error of this rank was not raised by the agreement") from error
    agree(comm, None)
    return made


def agree(comm: Comm, error: Exception | None, value: Any = None) -> list[Any]:
    """Return the `value` of every rank. Raise on every rank if any has an error: its own, or one that quotes the first.

    For checks whose result may differ between ranks: a rank that raised alone would miss the next collective. The
    error that quotes another one is a ValueError.
    """
    per_rank = comm.gather_objects((None if error is None else f"{type(error).__name__}: {error}", value))
    if error is not None:
        raise error
    for rank, (text, _) in enumerate(per_rank):
        if text is not None:
            raise ValueError(f"rank {rank} refused: {text}")
    return [of_rank for _, of_rank in per_rank]


def sum_together_(tensors: Iterable[Tensor], comm: Comm, *, scale: float = 1.0) -> None:
    """Replace small contiguous tensors by `scale` times their sums over ranks, in one all-reduce per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        flat = torch.cat([tensor.view(-1) for tensor in same])
        comm.all_reduce_(flat)
        if scale != 1.0:
            flat.mul_(scale)
        start = 0
        for tensor in same:
            tensor.view(-1).copy_(flat[start : start + tensor.numel()])
            start += tensor.numel()


class HostComm(Comm):
    """A `Comm` for host tensors: copies them to the device and results back. The host waits for every collective."""

    def __init__(self, comm: Comm, device: Device):
        self.comm = comm
        self.device = device
        self.rank = comm.rank
        self.size = comm.size

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        on_device = self.device.upload(x)
        self.comm.all_reduce_(on_device, op=op)
        return self._back(x, on_device)

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        return self._through(self.comm.reduce_scatter_, shard, full)

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        return self._through(self.comm.all_gather_, full, shard)

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        return self._through(partial(self.comm.all_to_all_, sizes=sizes), out, x)

    def broadcast_(self, x: Tensor, *, src: int = 0) -> None:
        on_device = self.device.upload(x)
        self.comm.broadcast_(on_device, src=src)
        self._back(x, on_device)

    def gather_objects(self, value: Any) -> list[Any]:
        return self.comm.gather_objects(value)

    def _through(self, collective: Callable[[Tensor, Tensor], Pending], out: Tensor, x: Tensor) -> Pending:
        sent = self.device.upload(x)
        received = sent.new_empty(out.numel())
        collective(received, sent)
        return self._back(out, received)

    def _back(self, x: Tensor, on_device: Tensor) -> Pending:
        x.view(-1).copy_(self.device.to_host(on_device).view(-1))
        return DONE
