"""The storage writer: one file per rank, checksums while writing, one step as the commit.

A save is written to a folder of its own (`store`). Every rank writes and syncs its own file. The coordinator adds
`.metadata`, for stock readers, and the manifest, and then commits. Before the commit the checkpoint does not exist;
after it, the checkpoint is complete.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from opt_checkpoint.dcp.save_planner import Planned, ShardedSavePlanner
from opt_checkpoint.dcp.written import WrittenFile, paths_of, stored_by
from opt_checkpoint.disk.checksums import crc32
from opt_checkpoint.disk.data_file import file_header
from opt_checkpoint.disk.data_file_writer import DataFileWriter, Placed
from opt_checkpoint.disk.dcp_metadata import MEGATRON_MARK, METADATA, encode_megatron_mark
from opt_checkpoint.disk.dcp_metadata_writer import encode_dcp_metadata
from opt_checkpoint.disk.index import ByteRange, CheckpointIndex, Kind, StoredFile
from opt_checkpoint.disk.manifest import encode_manifest
from opt_checkpoint.store import MANIFEST, Location, Target, target_at


class WriteTo(NamedTuple):
    """The parts that a rank writes, sent to it by the coordinator."""

    file: str
    save_id: str


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
        details: MappingProxyType[str, Any] = MappingProxyType({}),
        target: Target | None = None,
        replace: bool = False,
    ) -> None:
        self.path = path
        self._save_id = save_id
        self._details, self._replace = details, replace
        self._store, self._target = target or target_at(path)
        self._planned: Planned | None = None
        self.index: CheckpointIndex | None = None

    @property
    def temporary(self) -> Location:
        """The directory that is written to until the commit."""
        return self._store.path(self._store.folder(self._target, self._save_id))

    def begin(self, planned: Planned) -> list[WriteTo]:
        """Create the temporary location and name the files; on the coordinator. Raises like `Store.begin`."""
        self._store.begin(self._target, self._save_id, replace=self._replace)
        self._planned = planned
        return [WriteTo(f"__{rank}_0.distcp", self._save_id) for rank in range(len(planned.objects))]

    def write_data(self, to: WriteTo, planner: ShardedSavePlanner) -> WrittenFile:
        """Write this rank's file and sync it.

        Raises:
            OSError: the file system reports an error.
        """
        tensors = lambda: ((key, values) for key, _, values in planner.parts())
        output = DataFileWriter(file_header(to.save_id), planner.objects, tensors)
        self._store.write(f"{self._store.folder(self._target, to.save_id)}/{to.file}", output)
        return _written_file(to.file, output.written(), planner.assigned.crc, output.placed)

    def finish(self, written: list[WrittenFile]) -> None:
        """On the coordinator, write the manifest and commit.

        Raises:
            CheckpointingException: a planned item was not written; see also `Store.commit`.
            OSError: the file system reports an error.
        """
        planned = self._planned
        if planned is None:
            raise RuntimeError("begin was not called")
        stored, paths = stored_by(planned, written), paths_of(planned)
        index = CheckpointIndex(
            path=self.path,
            kind=Kind.OURS,
            tensors=stored.tensors,
            objects={key: place for key, place in stored.objects.items() if key not in planned.stock_only},
            files={own.name: own.whole for own in written},
            save_id=self._save_id,
            details={"torch": torch.__version__, "paths": paths, **self._details},
        )
        contents = {
            METADATA: encode_dcp_metadata(stored.tensors, stored.objects, list(index.files), stored.archives, paths),
            MEGATRON_MARK: encode_megatron_mark(),
        }
        index.files.update((name, StoredFile(size=len(raw), crc=crc32(raw))) for name, raw in contents.items())
        contents[MANIFEST] = encode_manifest(index)
        self._store.write_small(self._store.folder(self._target, self._save_id), contents)
        sizes = {name: file.size for name, file in index.files.items()} | {MANIFEST: len(contents[MANIFEST])}
        self._store.commit(self._target, self._save_id, sizes, replace=self._replace)
        self.index = index

    def release(self) -> None:
        """Release the lease on the temporary location; called by `finish` and `abandon`."""
        self._store.release(self._save_id)

    def abandon(self) -> None:
        """Remove the files of a failed save; on the coordinator, once all ranks have finished."""
        self._store.abandon(self._target, self._save_id)


def _written_file(name: str, whole: StoredFile, parts_crc: int, placed: list[Placed]) -> WrittenFile:
    """The columns of a file: tensors in order, objects by key."""
    tensors = [p for p in placed if p.values_start >= 0]
    start = np.array([p.start for p in tensors], "<i8")
    objects = {
        p.key: ByteRange(file=name, start=p.start, nbytes=p.end - p.start, crc=p.sums[0], archive=True)
        for p in placed
        if p.values_start < 0
    }
    return WrittenFile(
        name=name,
        whole=whole,
        parts_crc=parts_crc,
        start=np.array([p.values_start for p in tensors], "<i8"),
        archive_start=start,
        archive_nbytes=np.array([p.end for p in tensors], "<i8") - start,
        sums=np.array([s for p in tensors for s in p.sums], "<u4"),
        objects=objects,
    )
