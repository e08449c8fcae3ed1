"""How ranks with two tiers use a process group: they send directories to each other, and threads take turns."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Condition
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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


def exchange(ranks: Ranks, parcels: Sequence[Parcel], store: Directory, what: str) -> None:
    """Send directories; all ranks call this together. A directory appears when it is complete.

    A rank has one chunk of each of its parcels in memory at a time. A rank that cannot read or write still sends and
    receives its messages, whose bytes are then arbitrary, and all ranks raise its error at the end.

    Args:
        ranks: the process group.
        parcels: those that this rank sends or receives; a rank sends to another at most one.
        store: what the directories are in.
        what: named in errors.

    Raises:
        CheckpointingException: a rank failed.
    """
    sources = {parcel: Directory(store.path(parcel.name)) for parcel in parcels if parcel.sender == ranks.rank}
    arrivals = {p: store.folder(p.name, uuid.uuid4().hex) for p in parcels if p.receiver == ranks.rank}
    listings = from_all(ranks, lambda: {parcel: _chunks_of(source) for parcel, source in sources.items()}, what)
    chunks = {parcel: listings[parcel.sender][parcel] for parcel in (*sources, *arrivals)}
    memory = {p: torch.empty(max((c.nbytes for c in own), default=0), dtype=torch.uint8) for p, own in chunks.items()}
    crcs: dict[Parcel, dict[str, int]] = {parcel: {} for parcel in arrivals}
    errors: list[BaseException] = []

    def attempt(act: Callable[..., object], *arguments: object) -> None:
        try:
            if not errors:
                act(*arguments)
        except BaseException as error:  # raised at the end: messages still go
            errors.append(error)

    def write(parcel: Parcel, chunk: _Chunk, view: memoryview) -> None:
        with store.shared_file(f"{arrivals[parcel]}/{chunk.file}", is_new=not chunk.start) as put:
            put(view, chunk.start)
        crcs[parcel][chunk.file] = crc32(view, crcs[parcel].get(chunk.file, 0))

    try:
        for parcel, folder in arrivals.items():
            attempt(store.make_parents, store.path(parcel.name))
            attempt(store.make_dir, store.path(folder))
        for number in range(max(map(len, chunks.values()), default=0)):
            works = []
            moved = [
                (p, own[number], memory[p][: own[number].nbytes]) for p, own in chunks.items() if number < len(own)
            ]
            for parcel, chunk, message in moved:
                if parcel in sources:
                    attempt(sources[parcel].read_into, chunk.file, chunk.start, bytes_view(message))
                go, peer = (dist.isend, parcel.receiver) if parcel in sources else (dist.irecv, parcel.sender)
                peer = peer if ranks.group is None else dist.get_global_rank(ranks.group, peer)
                works.append(go(message, peer, group=ranks.group))
            for work in works:
                if work is not None:
                    work.wait()
            for parcel, chunk, message in moved:
                if parcel in arrivals:
                    attempt(write, parcel, chunk, bytes_view(message))
        for parcel, folder in arrivals.items():
            attempt(_complete, store, parcel, folder, crcs[parcel])
    except RuntimeError as error:  # gloo's timeouts and lost connections
        raise CheckpointFailedError(f"{what} failed: a rank did not answer: {error}") from error
    finally:
        for folder in arrivals.values():
            if store.path(folder).is_dir():
                with suppress(OSError):
                    store.discard(folder)

    def finish() -> None:
        if errors:
            raise errors[0]

    from_all(ranks, finish, what)


def _chunks_of(source: Directory) -> list[_Chunk]:
    """The files of a directory in chunks; empty if it cannot be read, which the receiver detects."""
    with suppress(OSError):
        return [
            _Chunk(file, start, min(_CHUNK_BYTES, size - start))
            for file, size in sorted(source.sizes().items())
            for start in range(0, size, _CHUNK_BYTES)
        ]
    return []


def _complete(store: Directory, parcel: Parcel, folder: str, crcs: Mapping[str, int]) -> None:
    """Rename a received directory to its name, if the checksums of all its files match."""
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
