"""The collectives the step and the buffers use, as a protocol: over a process group, or alone."""

from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from opt_distributed.comm.allocate import Allocate, zeros
from opt_distributed.comm.process_exit import Started

Made = TypeVar("Made")


class Op(Enum):
    """How values of several ranks become one."""

    SUM = auto()
    MAX = auto()


class Pending(Protocol):
    """A collective that was started. `wait` returns when its result may be read; it may be called again."""

    def wait(self) -> object: ...


class _Done:
    def wait(self) -> None:
        return None


DONE: Pending = _Done()


class Sizes(NamedTuple):
    """Elements of the parts of an `all_to_all_`, by rank; the rank itself is among them."""

    received: Sequence[int]  # of `out`, from each
    sent: Sequence[int]  # of `x`, to each


class Comm(Protocol):
    """One rank's view of a group of ranks. Every rank of the group makes the same calls in the same order.

    Tensors are contiguous. The in-place forms are allowed: `shard` may be this rank's part of `full`. A call with
    `async_op` returns at once, and its tensors belong to the collective until `wait`; without it, it is complete.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce_(self, x: Tensor, *, op: Op = Op.SUM, async_op: bool = False) -> Pending:
        """Writes `x`: the reduction over ranks."""
        ...

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        """Writes `shard` (n,): rank r's part of the sum of `full` (size * n,). What is left in `full` is undefined."""
        ...

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        """Writes `full` (size * n,): the shards (n,) of all ranks, in rank order."""
        ...

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        """Writes `out`: part r is what rank r's `x` held for this rank. Parts are equal unless `sizes` are given."""
        ...

    def broadcast_(self, x: Tensor, *, src: int = 0) -> None:
        """Writes `x` on every rank but `src` of this group: what `src` holds."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank. Values are small and picklable."""
        ...

    def allocate(self, numel: int, /, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(numel,) zeros: memory for a buffer that its collectives read and write. See `comm.allocate`."""
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


# torch 2.13 renamed the two flat collectives and deprecates the old names.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_OPS = {Op.SUM: dist.ReduceOp.SUM, Op.MAX: dist.ReduceOp.MAX}


def _pending(work: Any) -> Pending:
    return DONE if work is None else Started(work)


class TorchComm:
    """A `torch.distributed` process group. This rank must belong to it. `allocate` makes the memory of its buffers."""

    def __init__(self, group: dist.ProcessGroup, *, allocate: Allocate = zeros):
        self.group = group
        self._allocate = allocate
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
        return self._allocate(numel, dtype=dtype, device=device)


def comm_of(group: dist.ProcessGroup | None) -> Comm:
    """The `Comm` of a process group; None is a world of one."""
    return Alone() if group is None else TorchComm(group)


def group_of(comm: Comm) -> dist.ProcessGroup | None:
    """The process group of a `Comm`; None where it is over something else, or over nothing."""
    return comm.group if isinstance(comm, TorchComm) else None


def agreed(comm: Comm, make: Callable[[], Made]) -> Made:
    """What `make` returns; its error on one rank is an error on all. `make` calls no collective."""
    try:
        made = make()
    except Exception as error:  # of any kind: the other ranks wait in `agree`
        agree(comm, error)
        raise AssertionError("an error of this rank passed for an agreement") from error
    agree(comm, None)
    return made


def agree(comm: Comm, error: Exception | None) -> None:
    """Raises on every rank if any rank brings an error: its own where it has one, else a ValueError naming the first.

    For verdicts about what ranks may see differently, before the first collective that one of them would miss.
    """
    told = comm.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(told):
        if text is not None:
            raise ValueError(f"rank {rank} refused: {text}")
