"""The storage writer: one file per rank, checksums while writing, one step as the commit.

A save is written to a folder of its own (`store`). Every rank writes and syncs its own file. The coordinator adds
`.metadata`, for stock readers, and the manifest, and then commits. Before the commit the checkpoint does not exist;
after it, the checkpoint is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from opt_checkpoint.dcp.plan import GlobalPlan
from opt_checkpoint.dcp.save_planner import ShardedSavePlanner
from opt_checkpoint.disk.checksums import PIECE_BYTES, crc32
from opt_checkpoint.disk.columns import Array
from opt_checkpoint.disk.data_file import file_header
from opt_checkpoint.disk.data_file_writer import DataFileWriter
from opt_checkpoint.disk.dcp_metadata import MEGATRON_MARK, METADATA, encode_megatron_mark
from opt_checkpoint.disk.dcp_metadata_writer import encode_dcp_metadata
from opt_checkpoint.disk.index import ByteRange, CheckpointIndex, Kind, StoredFile
from opt_checkpoint.disk.manifest import encode_manifest
from opt_checkpoint.disk.stored_tensors import StoredTensors
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.store import MANIFEST, Location, Target, target_at


class WrittenFile(NamedTuple):
    """The data file of a rank. Columns have the order of the parts assigned to the rank.

    Args:
        name: file name within the checkpoint's directory.
        stored: its size and checksum.
        parts_crc: checksum of the parts assigned to the rank, which identifies them.
        start: (p,) start of the values of each part.
        archive_start: (p,) start of the archive around them.
        archive_nbytes: (p,) size of that archive.
        sums: the CRC-32 of every piece of each part, uint32.
        objects: the places of the objects, by unique key.
    """

    name: str
    stored: StoredFile
    parts_crc: int
    start: Array
    archive_start: Array
    archive_nbytes: Array
    sums: Array
    objects: dict[str, ByteRange]


class CheckpointWriter:
    """Writes one checkpoint. Each save needs a new writer.

    Args:
        path: the target, which must not exist.
        save_id: 32 hexadecimal digits, the same on all ranks or only the coordinator's; names this save.
        details: recorded in the manifest for people: versions, sizes of the worlds.
        target: the store and name of `path`, if it is not the usual one.
        replace: whether the commit replaces a checkpoint that is at `path`.
    """

    def __init__(
        self,
        path: Location,
        *,
        save_id: str,
        details: Mapping[str, Any] = MappingProxyType({}),
        target: Target | None = None,
        replace: bool = False,
    ) -> None:
        self.path = path
        self._save_id, self._details, self._replace = save_id, details, replace
        self._store, self._target = target or target_at(path)
        self.index: CheckpointIndex | None = None

    @property
    def temporary(self) -> Location:
        """The directory that is written to until the commit."""
        return self._store.path(self._store.folder(self._target, self._save_id))

    def begin(self, planner: ShardedSavePlanner) -> list[str]:
        """Create the temporary location, on the coordinator; the save id for each rank. Raises like `Store.begin`."""
        self._store.begin(self._target, self._save_id, replace=self._replace)
        return [self._save_id] * planner.plan.tensors.ranks

    def write(self, save_id: str, planner: ShardedSavePlanner) -> WrittenFile:
        """Write this rank's file and sync it.

        Raises:
            OSError: the file system reports an error.
        """
        name = f"__{planner.rank}_0.distcp"
        tensors = lambda: ((key, values) for key, _, values in planner.parts())
        output = DataFileWriter(file_header(save_id), planner.objects, tensors)
        self._store.write(f"{self._store.folder(self._target, save_id)}/{name}", output)
        placed = [item for item in output.placed if item.values_start >= 0]
        start = np.array([item.start for item in placed], "<i8")
        objects = {
            item.key: ByteRange(
                file=name, start=item.start, nbytes=item.end - item.start, crc=item.sums[0], archive=True
            )
            for item in output.placed
            if item.values_start < 0
        }
        return WrittenFile(
            name=name,
            stored=output.written(),
            parts_crc=planner.assigned.crc,
            start=np.array([item.values_start for item in placed], "<i8"),
            archive_start=start,
            archive_nbytes=np.array([item.end for item in placed], "<i8") - start,
            sums=np.array([crc for item in placed for crc in item.sums], "<u4"),
            objects=objects,
        )

    def finish(self, planner: ShardedSavePlanner, written: list[WrittenFile]) -> None:
        """On the coordinator, write the manifest and commit.

        Raises:
            CheckpointingException: a planned item was not written; see also `Store.commit`.
            OSError: the file system reports an error.
        """
        _check_complete(planner.plan, planner.objects_of_ranks, written)
        tensors, archives = _stored(planner.plan, written)
        objects = {key: place for own in written for key, place in own.objects.items()}
        paths = {key: path for own in planner.plan.layouts for key, path in own.plain.items()}
        stock_only = planner.stock_only
        index = CheckpointIndex(
            path=self.path,
            kind=Kind.OURS,
            tensors=tensors,
            objects={key: place for key, place in objects.items() if key not in stock_only},
            files={own.name: own.stored for own in written},
            save_id=self._save_id,
            details={"torch": torch.__version__, "paths": paths, **self._details},
        )
        contents = {
            METADATA: encode_dcp_metadata(tensors, objects, list(index.files), archives, paths),
            MEGATRON_MARK: encode_megatron_mark(),
        }
        index.files.update((name, StoredFile(size=len(raw), crc=crc32(raw))) for name, raw in contents.items())
        contents[MANIFEST] = encode_manifest(index)
        self._store.write_small(self._store.folder(self._target, self._save_id), contents)
        sizes = {name: file.size for name, file in index.files.items()} | {MANIFEST: len(contents[MANIFEST])}
        self._store.commit(self._target, self._save_id, sizes, replace=self._replace)
        self.index = index

    def abandon(self) -> None:
        """Remove the files of a failed save; on the coordinator, once all ranks have finished."""
        self._store.abandon(self._target, self._save_id)


def _check_complete(plan: GlobalPlan, objects: Sequence[Sequence[str]], written: Sequence[WrittenFile]) -> None:
    """Raise CheckpointingException unless each rank has written exactly what was planned.

    Args:
        plan: of the save.
        objects: unique keys of the objects of each rank.
        written: the files, by rank.
    """
    items = sum(len(own.start) + len(own.objects) for own in written)
    wanted = len(plan.parts.rank) + sum(map(len, objects))
    if items != wanted:
        raise CheckpointValueError(f"{items} items were written, {wanted} were planned")
    sums = np.bincount(plan.parts.rank, weights=_pieces(plan), minlength=len(written)).astype(np.int64).tolist()
    for rank, (own, assigned) in enumerate(zip(written, plan.assigned(), strict=True)):
        lengths = {len(column) for column in (own.start, own.archive_start, own.archive_nbytes, assigned.box)}
        if len(lengths) > 1 or len(own.sums) != sums[rank] or own.parts_crc != assigned.crc:
            raise CheckpointValueError(f"rank {rank} has not written the {len(assigned.box)} parts that were planned")
        if own.objects.keys() != set(objects[rank]):
            raise CheckpointValueError(f"rank {rank} has not written the objects that were planned")


def _stored(plan: GlobalPlan, written: Sequence[WrittenFile]) -> tuple[StoredTensors, tuple[Array, Array]]:
    """The stored tensors, sorted by key, once every rank has written its file; start and size of the archive of each
    chunk, in the order of their columns."""
    tensors, parts = plan.tensors, plan.parts
    keys = np.array(sorted(range(len(tensors.keys)), key=tensors.keys.__getitem__), np.int64)
    first = tensors.first_of_key[keys]
    place = np.argsort(keys)
    tensor = place[tensors.key[tensors.owner[parts.box]]]
    order = np.argsort(tensor, kind="stable")
    raw = [tensors.keys[number].encode("utf-8", "surrogatepass") for number in keys.tolist()]
    dtypes = sorted(tensors.dtype_names)
    renumbered = np.array([dtypes.index(name) for name in tensors.dtype_names] or [0])
    start, archive_start, archive_nbytes = (
        np.concatenate(columns).astype("<i8")[order]
        for columns in zip(*((own.start, own.archive_start, own.archive_nbytes) for own in written))
    )
    count = _pieces(plan)
    shift = np.repeat((np.cumsum(count) - count)[order] - (np.cumsum(count[order]) - count[order]), count[order])
    sums = np.concatenate([own.sums for own in written]).astype("<u4")
    columns = {
        "keys": np.frombuffer(b"".join(raw), "|u1"),
        "key_bytes": np.fromiter(map(len, raw), "<u4", len(raw)),
        "dtype": renumbered[tensors.dtype[first]].astype("|u1"),
        "ndim": tensors.ndim[first].astype("|u1"),
        "shape": tensors.shape[first].astype("<i8"),
        "chunks": np.bincount(tensor, minlength=len(keys)).astype("<i8"),
        "offsets": parts.offsets[order].astype("<i8"),
        "sizes": parts.sizes[order].astype("<i8"),
        "file": parts.rank[order].astype("<u4"),
        "start": start,
        "sums": sums[np.arange(len(sums)) + shift],
    }
    files = {own.name: own.stored for own in written}
    return StoredTensors(columns, tuple(dtypes), files), (archive_start, archive_nbytes)


def _pieces(plan: GlobalPlan) -> Array:
    """(p,) number of checksums of each part."""
    count: Array = np.maximum(1, -(-plan.parts_nbytes // PIECE_BYTES))
    return count
