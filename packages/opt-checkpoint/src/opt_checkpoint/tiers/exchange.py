"""How ranks with two tiers use a process group: they send directories to each other, and threads take turns."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Condition
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from opt_checkpoint.disk.data_file import bytes_view, crc32
from opt_checkpoint.disk.manifest import read_manifest
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointFailedError
from opt_checkpoint.run.ranks import Ranks, from_all
from opt_checkpoint.store.directory import Directory

_CHUNK_BYTES = 16 << 20


class Parcel(NamedTuple):
    """A checkpoint in a directory to send.

    Args:
        sender: rank of the group that has the directory.
        receiver: rank that gets a copy.
        name: of the directory, in the stores of both; nothing may be there on the receiver.
    """

    sender: int
    receiver: int
    name: str


class _Chunk(NamedTuple):
    """A run of bytes of a file."""

    file: str
    start: int
    nbytes: int


_Attempt: TypeAlias = Callable[..., None]
_Messages: TypeAlias = Generator[Tensor, None, None]


def exchange(ranks: Ranks, parcels: Sequence[Parcel], store: Directory, what: str) -> None:
    """Send directories; all ranks call this together. A directory appears when it is complete.

    A rank has one chunk of each of its parcels in memory at a time. A rank that cannot read or write still sends and
    receives its messages, and all ranks raise its error at the end.

    Args:
        ranks: the process group.
        parcels: those that this rank sends or receives; a rank sends to another at most one.
        store: what the directories are in.
        what: named in errors.

    Raises:
        CheckpointingException: a rank failed.
    """
    outgoing = [parcel for parcel in parcels if parcel.sender == ranks.rank]
    incoming = [parcel for parcel in parcels if parcel.receiver == ranks.rank]
    listings = from_all(ranks, lambda: {p.receiver: _chunks_of(store, p.name) for p in outgoing}, what)
    errors: list[BaseException] = []

    def attempt(act: Callable[..., object], *arguments: object) -> None:
        try:
            if not errors:
                act(*arguments)
        except BaseException as error:  # raised at the end: messages still go
            errors.append(error)

    ends: list[tuple[Callable[..., Any], int, _Messages]] = [
        *((dist.isend, p.receiver, _sent(p, listings[ranks.rank][p.receiver], store, attempt)) for p in outgoing),
        *((dist.irecv, p.sender, _received(p, listings[p.sender][ranks.rank], store, attempt)) for p in incoming),
    ]
    try:
        while waiting := [(go, peer, message) for go, peer, end in ends if (message := next(end, None)) is not None]:
            works = []
            for go, peer, message in waiting:
                peer = peer if ranks.group is None else dist.get_global_rank(ranks.group, peer)
                works.append(go(message, peer, group=ranks.group))
            for work in works:
                if work is not None:
                    work.wait()
    except RuntimeError as error:  # gloo's timeouts and lost connections
        raise CheckpointFailedError(f"{what} failed: a rank did not answer: {error}") from error
    finally:
        for _, _, end in ends:
            end.close()

    def finish() -> None:
        if errors:
            raise errors[0]

    from_all(ranks, finish, what)


def _chunks_of(store: Directory, name: str) -> list[_Chunk]:
    """The files of a directory in chunks; empty if it cannot be read, which the receiver detects."""
    with suppress(OSError):
        return [
            _Chunk(file, start, min(_CHUNK_BYTES, size - start))
            for file, size in sorted(store.sizes(name).items())
            for start in range(0, size, _CHUNK_BYTES)
        ]
    return []


def _memory_for(chunks: Sequence[_Chunk]) -> Tensor:
    return torch.empty(max((chunk.nbytes for chunk in chunks), default=0), dtype=torch.uint8)


def _sent(parcel: Parcel, chunks: Sequence[_Chunk], store: Directory, attempt: _Attempt) -> _Messages:
    """The bytes of each chunk. After an error they are arbitrary, which the receiver's checksums refuse."""
    memory, source = _memory_for(chunks), Directory(store.path(parcel.name))
    for file, start, nbytes in chunks:
        attempt(source.read_into, file, start, bytes_view(memory[:nbytes]))
        yield memory[:nbytes]


def _received(parcel: Parcel, chunks: Sequence[_Chunk], store: Directory, attempt: _Attempt) -> _Messages:
    """Memory for each chunk. Files go to a temporary directory, which is renamed if all their checksums match."""
    memory, folder = _memory_for(chunks), store.folder(parcel.name, uuid.uuid4().hex)
    crcs: dict[str, int] = {}

    def write(file: str, start: int, view: memoryview) -> None:
        with store.shared_file(f"{folder}/{file}", is_new=not start) as put:
            put(view, start)
        crcs[file] = crc32(view, crcs.get(file, 0))

    def finish() -> None:
        try:
            index = read_manifest(store.path(folder))
        except FileNotFoundError:
            raise CheckpointCorruptError(f"rank {parcel.sender} did not send all of {parcel.name}") from None
        for name, file in index.files.items():
            if crcs.get(name) != file.crc:
                raise CheckpointCorruptError(
                    f"{name} of {parcel.name} on rank {parcel.sender} is damaged: its checksum is wrong"
                )
        store.rename(store.path(folder), store.path(parcel.name))

    try:
        attempt(store.make_parents, store.path(parcel.name))
        attempt(store.make_dir, store.path(folder))
        for file, start, nbytes in chunks:
            yield memory[:nbytes]
            attempt(write, file, start, bytes_view(memory[:nbytes]))
        attempt(finish)
    finally:
        if store.path(folder).is_dir():
            with suppress(OSError):
                store.discard(folder)


class Turns:
    """The turns of the threads of this rank that use one process group, in the same order on every rank.

    Two threads that call collectives of one group in different orders on two ranks would exchange each other's
    messages. Before each collective, rank 0 therefore broadcasts whose turn it is. Messages from rank to rank need no
    turn.

    Args:
        choose: returns on every rank the name that rank 0 passes; a collective.
    """

    def __init__(self, choose: Callable[[str], str]) -> None:
        self._choose, self._changed = choose, Condition()
        self._waiting: list[str] = []
        self._is_choosing = False
        self._turn: str | None = None

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """A block in which no other thread of this rank uses the group."""
        with self._changed:
            self._waiting.append(name)
        try:
            while not self._has_turn(name):
                pass
            yield
        finally:
            with self._changed:
                self._waiting.remove(name)
                self._turn = None if self._turn == name else self._turn
                self._changed.notify_all()

    def _has_turn(self, name: str) -> bool:
        """Wait until it is this thread's turn, or until one is to be chosen; then choose it."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == name or (self._turn is None and not self._is_choosing))
            if self._turn == name:
                return True
            self._is_choosing, proposed = True, self._waiting[0]
        chosen = None
        try:
            chosen = self._choose(proposed)
        finally:
            with self._changed:
                self._is_choosing, self._turn = False, chosen
                self._changed.notify_all()
        return False


@dataclass(frozen=True)
class RanksInTurn(Ranks):
    """The ranks of a group that several threads use.

    Args:
        turns: of all these threads.
        name: of this thread, the same on all ranks.
    """

    turns: Turns = field(default_factory=lambda: Turns(lambda name: name))
    name: str = ""

    def call(self, collective: Callable[..., object], *arguments: Any) -> None:
        with self.turns.turn(self.name):
            super().call(collective, *arguments)


def in_turn(ranks: Ranks, *names: str) -> list[Ranks]:
    """Ranks for several threads, each with a name, that use one group; unchanged if there is one rank."""
    if ranks.size == 1:
        return [ranks] * len(names)
    turns = Turns(ranks.broadcast)
    return [RanksInTurn(ranks.rank, ranks.size, ranks.group, ranks.first, turns, name) for name in names]
