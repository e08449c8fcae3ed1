"""Sends directories of files from rank to rank over a process group."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from opt_checkpoint.disk.checksums import bytes_view, crc32
from opt_checkpoint.disk.manifest import read_manifest
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointFailedError
from opt_checkpoint.run.ranks import Ranks, from_all
from opt_checkpoint.store.directory import Directory

_CHUNK_BYTES = 16 << 20
Messages: TypeAlias = Generator[Tensor, None, None]


class Parcel(NamedTuple):
    """A directory to send.

    Args:
        sender: rank of the group that has the directory.
        receiver: rank that gets a copy.
        source: path on the sender.
        target: path on the receiver; it must not exist.
    """

    sender: int
    receiver: int
    source: Path
    target: Path


class _Chunk(NamedTuple):
    """A run of bytes of a file."""

    name: str
    start: int
    nbytes: int


class _End(NamedTuple):
    """One end of a parcel: how its messages go, the other rank, and their memory, one after another."""

    pass_on: Callable[..., Any]
    peer: int
    messages: Messages


def exchange(ranks: Ranks, parcels: Sequence[Parcel], store: Directory, what: str) -> None:
    """Send directories; all ranks call this together. A directory appears at its target when it is complete.

    A rank has one chunk of each of its parcels in memory at a time. A rank that cannot read or write still sends and
    receives its messages, and all ranks raise its error at the end.

    Args:
        ranks: the process group.
        parcels: those that this rank sends or receives; a rank sends to another at most one.
        store: the directory that targets are in.
        what: named in errors.

    Raises:
        CheckpointingException: a rank failed.
    """
    outgoing = [parcel for parcel in parcels if parcel.sender == ranks.rank]
    incoming = [parcel for parcel in parcels if parcel.receiver == ranks.rank]
    listings = from_all(ranks, lambda: {p.receiver: _chunks_of(p.source) for p in outgoing}, what)
    errors = _Errors()
    ends = [_End(dist.isend, p.receiver, _sent(p, listings[ranks.rank][p.receiver], errors)) for p in outgoing]
    ends += [_End(dist.irecv, p.sender, _received(p, listings[p.sender][ranks.rank], store, errors)) for p in incoming]
    try:
        waiting = [(end, next(end.messages, None)) for end in ends]
        while waiting := [(end, message) for end, message in waiting if message is not None]:
            works = []
            for end, message in waiting:
                peer = end.peer if ranks.group is None else dist.get_global_rank(ranks.group, end.peer)
                works.append(end.pass_on(message, peer, group=ranks.group))
            for work in works:
                if work is not None:
                    work.wait()
            waiting = [(end, next(end.messages, None)) for end, _ in waiting]
    except RuntimeError as error:  # gloo's timeouts and lost connections
        raise CheckpointFailedError(f"{what} failed: a rank did not answer: {error}") from error
    finally:
        for end in ends:
            end.messages.close()
    from_all(ranks, errors.raise_first, what)


class _Errors(list[BaseException]):
    """What went wrong on this rank."""

    def attempt(self, act: Callable[[], object]) -> None:
        """Call `act`, unless something went wrong before; keep its error, so that messages still go."""
        try:
            if not self:
                act()
        except BaseException as error:
            self.append(error)

    def raise_first(self) -> None:
        """Raise the first error, if there is one."""
        if self:
            raise self[0]


def _chunks_of(directory: Path) -> list[_Chunk]:
    """The files of a directory in chunks; empty if it cannot be read, which the receiver detects."""
    try:
        sizes = {entry.name: entry.stat().st_size for entry in sorted(directory.iterdir())}
    except OSError:
        return []
    return [
        _Chunk(name, start, min(_CHUNK_BYTES, size - start))
        for name, size in sizes.items()
        for start in range(0, size, _CHUNK_BYTES)
    ]


def _memory_for(chunks: Sequence[_Chunk]) -> Tensor:
    return torch.empty(max((chunk.nbytes for chunk in chunks), default=0), dtype=torch.uint8)


def _sent(parcel: Parcel, chunks: Sequence[_Chunk], errors: _Errors) -> Messages:
    """The bytes of each chunk. After an error they are arbitrary, which the receiver's checksums refuse."""
    memory = _memory_for(chunks)
    for name, start, nbytes in chunks:
        message = memory[:nbytes]
        errors.attempt(lambda: _read(parcel.source / name, start, bytes_view(message)))  # noqa: B023
        yield message


def _read(path: Path, start: int, view: memoryview) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        while len(view):
            count = os.preadv(fd, [view], start)
            if not count:
                raise CheckpointCorruptError(f"{path} is truncated: it ends at byte {start}")
            start, view = start + count, view[count:]
    finally:
        os.close(fd)


def _received(parcel: Parcel, chunks: Sequence[_Chunk], store: Directory, errors: _Errors) -> Messages:
    """Memory for each chunk. Files go to a temporary directory, which is renamed if all their checksums match."""
    memory, folder = _memory_for(chunks), store.folder(str(parcel.target.relative_to(store.root)), uuid.uuid4().hex)
    temporary = store.path(folder)
    crcs: dict[str, int] = {}
    fds: dict[str, int] = {}

    def write(name: str, view: memoryview) -> None:
        if name not in fds:
            _close(fds)
            fds[name] = store.open_new(temporary / name)
        crcs[name] = crc32(view, crcs.get(name, 0))
        store.append(fds[name], temporary / name, view)

    def finish() -> None:
        _check(parcel, temporary, crcs)
        store.rename(temporary, parcel.target)

    try:
        errors.attempt(lambda: store.make_parents(parcel.target))
        errors.attempt(lambda: store.make_dir(temporary))
        for name, _, nbytes in chunks:
            message = memory[:nbytes]
            yield message
            errors.attempt(lambda: write(name, bytes_view(message)))  # noqa: B023
        _close(fds)
        errors.attempt(finish)
    finally:
        _close(fds)
        if temporary.is_dir():
            with suppress(OSError):
                store.discard(folder)


def _close(fds: dict[str, int]) -> None:
    while fds:
        os.close(fds.popitem()[1])


def _check(parcel: Parcel, received: Path, crcs: dict[str, int]) -> None:
    """Raise CheckpointCorruptError unless the received files are those that were saved."""
    try:
        index = read_manifest(received)
    except FileNotFoundError:
        raise CheckpointCorruptError(f"rank {parcel.sender} did not send all of {parcel.source}") from None
    for name, file in index.files.items():
        if crcs.get(name) != file.crc:
            raise CheckpointCorruptError(
                f"{name} of {parcel.source} on rank {parcel.sender} is damaged: its checksum is wrong"
            )
