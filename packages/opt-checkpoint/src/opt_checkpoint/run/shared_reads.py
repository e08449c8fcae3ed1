"""Shared reads of replicas: values that several ranks request are read by one of them, which sends them to the others.

Ranks exchange the boxes of stored chunks that they request. Boxes that the same ranks request are divided among these
ranks by size. Each rank reads its share in batches and sends every batch to the others. So R replicas read a file once
instead of R times, and each sends and receives about as much as it requests.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from opt_checkpoint.boxes.box import Box, split_rows
from opt_checkpoint.dcp.reader import CheckpointReader
from opt_checkpoint.run.ranks import Ranks, everyone

_BATCH_BYTES = 32 << 20  # bytes that a rank reads and sends at a time; it needs twice as much memory
_TOKEN_BYTES = 16
_ALIGNMENT = 16  # alignment of values in a message, in bytes; at least that of any dtype
_HEADER_BYTES = _ALIGNMENT  # bytes of the header of a message, whose first byte is 1 if the values were read

Group = tuple[int, ...]


class HeldBack:
    """A reader that reads objects, and defers the reads of tensors.

    Args:
        reader: receives all other calls.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self.items: list[ReadItem] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan that are not shared."""
        self.items = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        others = [item for item in plan.items if item.type is not LoadItemType.TENSOR]
        return self._reader.read_data(LoadPlan(others), planner)


class _Wanted(NamedTuple):
    """A box of a stored chunk.

    Args:
        token: identifies it on all ranks.
        nbytes: size of its values in bytes.
    """

    token: bytes
    nbytes: int


def read_shared(
    ranks: Ranks, reader: CheckpointReader, planner: LoadPlanner, items: Sequence[ReadItem], what: str
) -> None:
    """Carry out the reads of all ranks, sharing those that are equal; all ranks call this together.

    Args:
        ranks: those that load.
        reader: of the checkpoint, with one index on all ranks.
        planner: of this rank; its memory is written.
        items: reads of tensors of this rank.
        what: named in errors.

    Raises:
        CheckpointingException: some rank could not read; the memory of all of them may be partly overwritten.
    """
    local: dict[_Wanted, list[ReadItem]] = defaultdict(list)
    before = reader.count.wanted
    for item in (part for whole in items for part in _bounded(whole, reader)):
        local[_wanted(item, reader)].append(item)
    shared = _shared(ranks, list(local))
    taken = {wanted for own in shared.values() for wanted in own}
    error: Exception | None = None
    try:
        alone = [item for wanted, own in local.items() if wanted not in taken for item in own]
        reader.read_data(LoadPlan(alone), planner).wait()
    except Exception as raised:
        error = raised
    for group, wanted in sorted(shared.items()):
        if ranks.rank in group:
            error = _Exchange(ranks, reader, planner, local, group).carry_out(wanted, error)
    reader.count.wanted = before + sum(wanted.nbytes * len(own) for wanted, own in local.items())
    everyone(ranks, error, f"{what} (while reading: tensors may be partly overwritten, load again before use)")


def _bounded(item: ReadItem, reader: CheckpointReader) -> Iterator[ReadItem]:
    """Divide a read into several of at most about `_BATCH_BYTES`, the same on all ranks."""
    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
    for part in split_rows(box, -(-_nbytes(item, reader) // _BATCH_BYTES)):
        moved = [d + p - s for d, p, s in zip(item.dest_offsets, part.offsets, item.storage_offsets)]
        yield ReadItem(
            type=item.type,
            dest_index=item.dest_index,
            dest_offsets=torch.Size(moved),
            storage_index=item.storage_index,
            storage_offsets=torch.Size(part.offsets),
            lengths=torch.Size(part.sizes),
        )


def _dtype(item: ReadItem, reader: CheckpointReader) -> torch.dtype:
    return reader.index.tensors[item.storage_index.fqn].dtype


def _nbytes(item: ReadItem, reader: CheckpointReader) -> int:
    return item.lengths.numel() * _dtype(item, reader).itemsize


def _wanted(item: ReadItem, reader: CheckpointReader) -> _Wanted:
    where = (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
    text = repr((where, tuple(item.storage_offsets), tuple(item.lengths)))
    return _Wanted(hashlib.blake2b(text.encode(), digest_size=_TOKEN_BYTES).digest(), _nbytes(item, reader))


def _shared(ranks: Ranks, wanted: Sequence[_Wanted]) -> dict[Group, list[_Wanted]]:
    """Boxes that several ranks request, by these ranks; the same on all ranks."""
    own = (b"".join(w.token for w in wanted), array("q", [w.nbytes for w in wanted]))
    holders: dict[_Wanted, list[int]] = defaultdict(list)
    for rank, (tokens, sizes) in enumerate(ranks.gather_everywhere(own)):
        for number, nbytes in enumerate(sizes):
            token = tokens[number * _TOKEN_BYTES :][:_TOKEN_BYTES]
            holders[_Wanted(token, nbytes)].append(rank)
    shared: dict[Group, list[_Wanted]] = defaultdict(list)
    for one, by in holders.items():
        if len(by) > 1:
            shared[tuple(by)].append(one)
    return shared


def batches_of(group: Group, wanted: Sequence[_Wanted]) -> dict[int, list[list[_Wanted]]]:
    """Divide boxes into batches, with about the same number of bytes for each rank of the group; the same on all
    ranks."""
    loads = [(0, rank) for rank in group]
    batches: dict[int, list[list[_Wanted]]] = {rank: [] for rank in group}
    for one in sorted(wanted, key=lambda w: (-w.nbytes, w.token)):
        load, rank = heapq.heappop(loads)
        heapq.heappush(loads, (load + one.nbytes, rank))
        own = batches[rank]
        if not own or sum(w.nbytes for w in own[-1]) + one.nbytes > _BATCH_BYTES:
            own.append([])
        own[-1].append(one)
    return batches


class _Exchange:
    """The reads that one group of ranks shares.

    Args:
        ranks: those that load.
        reader: reads this rank's share.
        planner: has the memory that values go to.
        local: this rank's reads.
        group: the ranks that share these reads; this one is among them.
    """

    def __init__(
        self,
        ranks: Ranks,
        reader: CheckpointReader,
        planner: LoadPlanner,
        local: Mapping[_Wanted, Sequence[ReadItem]],
        group: Group,
    ) -> None:
        self._ranks, self._reader, self._planner = ranks, reader, planner
        self._local, self._group = local, group

    def carry_out(self, wanted: Sequence[_Wanted], error: Exception | None) -> Exception | None:
        """Read, send and receive. A rank that cannot read marks its messages as empty, and continues to take part.

        Returns:
            The first error of this rank; `error` where there was one before.
        """
        batches = batches_of(self._group, wanted)
        rounds = max(map(len, batches.values()))
        for number in range(rounds):
            by_rank = {rank: own[number] if number < len(own) else [] for rank, own in batches.items()}
            message = _Message(by_rank[self._ranks.rank])
            try:
                if error is None:
                    self._read(message)
            except Exception as raised:
                error = raised
            for received in (message, *self._received(message, by_rank)):
                try:
                    self._put(received)
                except Exception as raised:
                    error = error or raised
        return error

    def _read(self, message: _Message) -> None:
        if not message.wanted:
            return
        views = {wanted: message.view(wanted, *self._kind(wanted)) for wanted in message.wanted}
        items = [self._local[wanted][0] for wanted in message.wanted]
        into = cast(LoadPlanner, _Into({id(item): views[w] for item, w in zip(items, message.wanted)}))
        self._reader.read_data(LoadPlan(items), into).wait()
        message.raw[0] = 1

    def _kind(self, wanted: _Wanted) -> tuple[torch.dtype, torch.Size]:
        item = self._local[wanted][0]
        return _dtype(item, self._reader), item.lengths

    def _received(self, own: _Message, by_rank: Mapping[int, Sequence[_Wanted]]) -> Iterator[_Message]:
        """Send this rank's message to every other rank of the group, and receive theirs, one after another."""
        position, size = self._group.index(self._ranks.rank), len(self._group)
        for step in range(1, size):
            to, source = self._group[(position + step) % size], self._group[(position - step) % size]
            message = _Message(by_rank[source])
            self._ranks.swap(own.raw if own.wanted else None, to, message.raw if message.wanted else None, source)
            yield message

    def _put(self, message: _Message) -> None:
        """Copy the values of a message to their memory."""
        if not message.wanted or not message.raw[0]:
            return
        for wanted in message.wanted:
            values = message.view(wanted, *self._kind(wanted))
            for item in self._local[wanted]:
                target = self._planner.resolve_tensor(item).detach()
                target.copy_(values)
                self._planner.commit_tensor(item, target)


class _Message:
    """The values of a batch as one run of bytes after a header.

    Args:
        wanted: the batch.
    """

    def __init__(self, wanted: Sequence[_Wanted]) -> None:
        self.wanted = wanted
        self._starts: dict[_Wanted, int] = {}
        end = _HEADER_BYTES
        for one in wanted:
            self._starts[one] = end
            end += -(-one.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.raw = torch.zeros(end if wanted else 0, dtype=torch.uint8)

    def view(self, wanted: _Wanted, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        """The values of a box."""
        start = self._starts[wanted]
        return self.raw[start : start + wanted.nbytes].view(dtype).view(shape)


class _Into:
    """The part of a planner that a reader needs; its memory is that of a message."""

    def __init__(self, views: Mapping[int, Tensor]) -> None:
        self._views = views

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self._views[id(read_item)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing."""
