"""Sends directories of files from rank to rank over a process group."""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from opt_checkpoint.disk.checksums import bytes_view, crc32
from opt_checkpoint.disk.manifest import read_manifest
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointFailedError
from opt_checkpoint.run.ranks import Ranks, everyone
from opt_checkpoint.store.directory import Directory

_CHUNK_BYTES = 16 << 20


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


class _Listed(NamedTuple):
    name: str
    size: int


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
    own = {parcel.receiver: _listing(parcel.source) for parcel in parcels if parcel.sender == ranks.rank}
    listings = ranks.gather_everywhere(own)
    outgoing = [_Outgoing(p, own[p.receiver]) for p in parcels if p.sender == ranks.rank]
    incoming = [_Incoming(p, listings[p.sender][ranks.rank], store) for p in parcels if p.receiver == ranks.rank]
    try:
        _run(ranks, outgoing, incoming)
    except RuntimeError as error:  # gloo's timeouts and lost connections
        raise CheckpointFailedError(f"{what} failed: a rank did not answer: {error}") from error
    finally:
        errors = [end.close() for end in (*outgoing, *incoming)]
    everyone(ranks, next(filter(None, errors), None), what)


def _listing(directory: Path) -> list[_Listed]:
    """The files of a directory; empty if it cannot be read, which the receiver detects."""
    try:
        return [_Listed(entry.name, entry.stat().st_size) for entry in sorted(directory.iterdir())]
    except OSError:
        return []


def _run(ranks: Ranks, outgoing: Sequence[_Outgoing], incoming: Sequence[_Incoming]) -> None:
    """Transfer the next chunk of every parcel in each round."""
    while busy := [end for end in (*outgoing, *incoming) if end.left]:
        waiting = []
        for end in busy:
            chunk = end.next_chunk()
            peer = end.parcel.receiver if isinstance(end, _Outgoing) else end.parcel.sender
            to = peer if ranks.group is None else dist.get_global_rank(ranks.group, peer)
            send = dist.isend if isinstance(end, _Outgoing) else dist.irecv
            waiting.append((end, send(chunk, to, group=ranks.group)))
        for end, work in waiting:
            if work is not None:
                work.wait()
            end.chunk_done()


class _End(ABC):
    """One end of a parcel: its files one after another, in chunks."""

    @abstractmethod
    def next_chunk(self) -> Tensor:
        """The memory of the next chunk."""

    @abstractmethod
    def chunk_done(self) -> None:
        """Continue after the message of the last chunk has arrived."""

    @abstractmethod
    def close(self) -> Exception | None:
        """End the transfer, and return its error, if any."""

    def __init__(self, parcel: Parcel, listing: Sequence[_Listed]) -> None:
        self.parcel = parcel
        self.error: Exception | None = None
        self._chunks = [
            (file.name, start, min(_CHUNK_BYTES, file.size - start))
            for file in listing
            for start in range(0, file.size, _CHUNK_BYTES)
        ]
        self._number = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._fd, self._open = -1, ""

    @property
    def left(self) -> bool:
        """Whether chunks are left."""
        return self._number < len(self._chunks)

    def _take(self) -> tuple[str, int, Tensor]:
        name, start, size = self._chunks[self._number]
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return name, start, self._buffer[:size]

    def _shut(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._open = -1, ""


class _Outgoing(_End):
    """Reads files. After an error it sends arbitrary bytes, which the receiver's checksums refuse."""

    def next_chunk(self) -> Tensor:
        name, start, chunk = self._take()
        try:
            if self.error is None:
                self._read(name, start, bytes_view(chunk))
        except (OSError, CheckpointCorruptError) as error:
            self.error = error
        return chunk

    def _read(self, name: str, start: int, view: memoryview) -> None:
        if self._open != name:
            self._shut()
            self._fd, self._open = os.open(self.parcel.source / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), name
        while len(view):
            count = os.preadv(self._fd, [view], start)
            if not count:
                raise CheckpointCorruptError(f"{self.parcel.source / name} is truncated: it ends at byte {start}")
            start, view = start + count, view[count:]

    def chunk_done(self) -> None:
        self._number += 1

    def close(self) -> Exception | None:
        self._shut()
        return self.error


class _Incoming(_End):
    """Writes files to a temporary directory, which is renamed to its target if all checksums match."""

    def __init__(self, parcel: Parcel, listing: Sequence[_Listed], store: Directory) -> None:
        super().__init__(parcel, listing)
        self._store = store
        self._crcs = {file.name: 0 for file in listing}
        target = str(parcel.target.relative_to(store.root))
        self._folder = store.folder(target, uuid.uuid4().hex)
        self._temporary = store.path(self._folder)
        try:
            store.make_parents(parcel.target)
            store.make_dir(self._temporary)
        except OSError as error:
            self.error = error

    def next_chunk(self) -> Tensor:
        return self._take()[2]

    def chunk_done(self) -> None:
        name, _, chunk = self._take()
        self._number += 1
        try:
            if self.error is None:
                self._write(name, bytes_view(chunk))
        except OSError as error:
            self.error = error

    def _write(self, name: str, view: memoryview) -> None:
        if self._open != name:
            self._shut()
            self._fd, self._open = self._store.open_new(self._temporary / name), name
        self._crcs[name] = crc32(view, self._crcs[name])
        self._store.append(self._fd, self._temporary / name, view)

    def close(self) -> Exception | None:
        self._shut()
        try:
            if self.error is None and not self.left:
                self._check()
                self._store.rename(self._temporary, self.parcel.target)
        except (OSError, CheckpointCorruptError) as error:
            self.error = error
        if self._temporary.is_dir():
            self._store.discard(self._folder)
        return self.error

    def _check(self) -> None:
        try:
            index = read_manifest(self._temporary)
        except FileNotFoundError:
            raise CheckpointCorruptError(
                f"rank {self.parcel.sender} did not send all of {self.parcel.source}"
            ) from None
        for name, file in index.files.items():
            if self._crcs.get(name) != file.crc:
                raise CheckpointCorruptError(
                    f"{name} of {self.parcel.source} on rank {self.parcel.sender} is damaged: its checksum is wrong"
                )
