"""The files that ranks have written, as columns, and the checkpoint index made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from opt_checkpoint.dcp.save_planner import Planned
from opt_checkpoint.disk.checksums import PIECE_BYTES
from opt_checkpoint.disk.columns import Array
from opt_checkpoint.disk.index import ByteRange, StoredFile
from opt_checkpoint.disk.stored_tensors import StoredTensors
from opt_checkpoint.errors import CheckpointValueError


class WrittenFile(NamedTuple):
    """The data file of a rank. Columns have the order of the parts assigned to the rank.

    Args:
        name: file name within the checkpoint's directory.
        whole: its size and checksum.
        parts_crc: checksum of the parts assigned to the rank, which identifies them.
        start: (p,) start of the values of each part.
        archive_start: (p,) start of the archive around them.
        archive_nbytes: (p,) size of that archive.
        sums: the CRC-32 of every piece of each part, uint32.
        objects: the places of the objects, by unique key.
    """

    name: str
    whole: StoredFile
    parts_crc: int
    start: Array
    archive_start: Array
    archive_nbytes: Array
    sums: Array
    objects: dict[str, ByteRange]


class Stored(NamedTuple):
    """Everything that was written.

    Args:
        tensors: the tensors by key.
        objects: the objects by unique key.
        archives: start and size of the archive of each chunk, in the order of `tensors`' columns.
    """

    tensors: StoredTensors
    objects: dict[str, ByteRange]
    archives: tuple[Array, Array]


def stored_by(planned: Planned, written: Sequence[WrittenFile]) -> Stored:
    """The stored tensors and objects, once every rank has written its file.

    Args:
        planned: the plan of the save.
        written: the files, by rank.

    Raises:
        CheckpointingException: a rank has not written exactly its assigned parts.
    """
    _check_complete(planned, written)
    plan = planned.plan
    held, parts = plan.held, plan.parts
    keys = sorted(range(len(held.keys)), key=held.keys.__getitem__)
    first = np.zeros(len(keys), np.int64)
    first[held.key[::-1]] = np.arange(len(held.key))[::-1]
    first = first[keys]
    place = np.zeros(len(keys), np.int64)
    place[keys] = np.arange(len(keys))
    owner = held.owner[parts.box]
    tensor = place[held.key[owner]]
    order = np.argsort(tensor, kind="stable")
    raw = [held.keys[number].encode("utf-8", "surrogatepass") for number in keys]
    dtypes = sorted(held.dtype_names)
    renumbered = np.array([dtypes.index(name) for name in held.dtype_names] or [0])
    columns = {
        "keys": np.frombuffer(b"".join(raw), "|u1"),
        "key_bytes": np.fromiter(map(len, raw), "<u4", len(raw)),
        "dtype": renumbered[held.dtype[first]].astype("|u1"),
        "ndim": held.ndim[first].astype("|u1"),
        "shape": held.shape[first].astype("<i8"),
        "chunks": np.bincount(tensor, minlength=len(keys)).astype("<i8"),
        "offsets": parts.offsets[order].astype("<i8"),
        "sizes": parts.sizes[order].astype("<i8"),
        "file": parts.rank[order].astype("<u4"),
        "start": _joined(written, "start", "<i8")[order],
        "sums": _sums(_joined(written, "sums", "<u4"), plan.parts_nbytes, order),
    }
    archives = tuple(_joined(written, name, "<i8")[order] for name in ("archive_start", "archive_nbytes"))
    files = {own.name: own.whole for own in written}
    objects = {key: where for own in written for key, where in own.objects.items()}
    return Stored(StoredTensors(columns, tuple(dtypes), files), objects, (archives[0], archives[1]))


def _check_complete(planned: Planned, written: Sequence[WrittenFile]) -> None:
    parts = planned.plan.parts
    counts = np.bincount(parts.rank, minlength=planned.plan.held.ranks).tolist()
    pieces = np.maximum(1, -(-planned.plan.parts_nbytes // PIECE_BYTES))
    sums = np.bincount(parts.rank, weights=pieces, minlength=len(counts)).astype(np.int64).tolist()
    items = sum(len(own.start) + len(own.objects) for own in written)
    wanted = sum(counts) + sum(map(len, planned.objects))
    if items != wanted:
        raise CheckpointValueError(f"{items} items were written, {wanted} were planned")
    for rank, (own, assigned) in enumerate(zip(written, planned.plan.assigned(), strict=True)):
        is_whole = len(own.start) == len(own.archive_start) == len(own.archive_nbytes) == counts[rank]
        if not is_whole or len(own.sums) != sums[rank] or own.parts_crc != assigned.crc:
            raise CheckpointValueError(f"rank {rank} has not written the {counts[rank]} parts that were planned")
        if own.objects.keys() != set(planned.objects[rank]):
            raise CheckpointValueError(f"rank {rank} has not written the objects that were planned")


def _joined(written: Sequence[WrittenFile], name: str, dtype: str) -> Array:
    column: Array = np.concatenate([getattr(own, name) for own in written]).astype(dtype)
    return column


def _sums(sums: Array, nbytes: Array, order: Array) -> Array:
    """The checksums of all chunks, with the chunks reordered."""
    count = np.maximum(1, -(-nbytes // PIECE_BYTES))
    first = np.cumsum(count) - count
    count, first = count[order], first[order]
    shift = np.repeat(first - (np.cumsum(count) - count), count)
    picked: Array = sums[np.arange(len(sums)) + shift]
    return picked


def paths_of(planned: Planned) -> Mapping[str, tuple[str | int, ...]]:
    """The paths of the stored plain tensors in the state, by key."""
    return {key: path for own in planned.plan.layouts for key, path in own.plain.items()}
