"""`Comm`, the collectives that steps and buffers use: over a process group, or in a world of one rank."""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from opt_distributed.comm.allocate import Allocate, zeros
from opt_distributed.comm.process_exit import Started, wait_at_exit

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

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        """Reduce `x` over all ranks, in place."""
        ...

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        """Write to `shard` (n,) this rank's part of the sum of `full` (size * n,). Leaves `full` undefined."""
        ...

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        """Write to `full` (size * n,) the shards (n,) of all ranks, in rank order."""
        ...

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        """Write to part r of `out` the part of rank r's `x` for this rank. Parts are equal unless `sizes` is given."""
        ...

    def broadcast_(self, x: Tensor, *, src: int = 0) -> None:
        """Write to `x` on every rank its value on rank `src` of the group."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, in rank order. Values are small and picklable."""
        ...

    def allocate(self, numel: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return (numel,) zeros, for a buffer that collectives of this group read and write. See `comm.allocate`."""
        ...


class Alone:
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

    def allocate(self, numel: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return zeros(numel, dtype=dtype, device=device)


ALONE: Comm = Alone()

# torch 2.13 renamed the two flat collectives and deprecates the old names.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_OPS = {Op.SUM: dist.ReduceOp.SUM, Op.MAX: dist.ReduceOp.MAX}


def _pending(work: Any) -> Pending:
    return DONE if work is None else Started(work)


class TorchComm:
    """A `torch.distributed` process group to which this rank belongs. `allocate` allocates its buffers."""

    def __init__(self, group: dist.ProcessGroup, *, allocate: Allocate = zeros):
        wait_at_exit()
        self.group = group
        self.allocates = allocate
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        return _pending(dist.all_reduce(x, op=_OPS[op], group=self.group, async_op=async_op))

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        return _pending(_reduce_scatter(shard, full, group=self.group, async_op=async_op))

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        return _pending(_all_gather(full, shard, group=self.group, async_op=async_op))

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        received, sent = (None, None) if sizes is None else (list(sizes.received), list(sizes.sent))
        return _pending(dist.all_to_all_single(out, x, received, sent, group=self.group, async_op=async_op))

    def broadcast_(self, x: Tensor, *, src: int = 0) -> None:
        dist.broadcast(x, src=dist.get_global_rank(self.group, src), group=self.group)

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def allocate(self, numel: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.allocates(numel, dtype=dtype, device=device)


def comm_of(group: dist.ProcessGroup | None) -> Comm:
    """Return the `Comm` of a process group; None stands for a world of one rank."""
    return Alone() if group is None else TorchComm(group)


def group_of(comm: Comm) -> dist.ProcessGroup | None:
    """Return the process group of a `Comm`; None if it has none, as `Alone` and `ThreadComm`."""
    return comm.group if isinstance(comm, TorchComm) else None


def agreed(comm: Comm, make: Callable[[], Made]) -> Made:
    """Return `make()`, or raise on every rank if it raises on one. `make` must not call a collective."""
    try:
        made = make()
    except Exception as error:  # of any kind, because the other ranks wait in `agree`
        agree(comm, error)
        raise AssertionError("an error of this rank was not raised by the agreement") from error
    agree(comm, None)
    return made


def agree(comm: Comm, error: Exception | None) -> None:
    """Raise on every rank if any rank has an error: its own error, or a ValueError that quotes the first one.

    For checks whose result may differ between ranks: a rank that raised alone would miss the next collective.
    """
    reported = comm.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(reported):
        if text is not None:
            raise ValueError(f"rank {rank} refused: {text}")
