"""The storage writer: one file per rank, checksums while writing, one rename as the commit.

A save is written to a temporary directory next to its target (`disk.lease`). Every rank writes and syncs its own file;
the coordinator adds `.metadata` for stock readers and the manifest, syncs the directory, and renames it. Before the
rename there is no checkpoint, after it there is a whole one.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from opt_checkpoint.boxes.box import Box
from opt_checkpoint.disk.checksums import HASH_PIECE_BYTES, PieceSums, bytes_view, crc32
from opt_checkpoint.disk.data_file import file_header
from opt_checkpoint.disk.data_file_writer import DataFileWriter, ItemSums
from opt_checkpoint.disk.dcp_metadata import MEGATRON_MARK, METADATA, encode_megatron_mark
from opt_checkpoint.disk.dcp_metadata_writer import encode_dcp_metadata
from opt_checkpoint.disk.files import Files, LocalFiles, new_file, write_file
from opt_checkpoint.disk.hasher import Hasher
from opt_checkpoint.disk.index import ByteRange, CheckpointIndex, Kind, StoredChunk, StoredFile, StoredTensor
from opt_checkpoint.disk.manifest import MANIFEST, encode_manifest
from opt_checkpoint.disk.new_directory import NewDirectory
from opt_checkpoint.disk.read_region import is_plain_memory
from opt_checkpoint.disk.stored_tensors import StoredTensors
from opt_checkpoint.disk.torch_zip_reader import contiguous
from opt_checkpoint.disk.torch_zip_writer import frame_tensor
from opt_checkpoint.errors import CheckpointingException

_SMALL_BYTES = 256 << 10


class WriteTo(NamedTuple):
    """Where a rank writes: sent to it by the coordinator."""

    directory: Path
    file: str
    save_id: str


class Written(NamedTuple):
    """One item on disk.

    Args:
        values: bare values of a tensor, or the archive of an object.
        archive: the archive around them, for stock readers.
    """

    values: ByteRange
    archive: ByteRange


class _Placed(NamedTuple):
    """One item in the file; its sums may still be on their way."""

    item: WriteItem
    archive_start: int
    archive_end: int
    values_start: int
    values_nbytes: int
    sums: ItemSums

    def written(self, file: str) -> Written:
        """Where the item is, with its sums."""
        sums = self.sums.settled()
        bare = self.item.type is WriteItemType.BYTE_IO
        nbytes = self.archive_end - self.archive_start
        values = ByteRange(file=file, start=self.values_start, nbytes=self.values_nbytes, archive=bare)
        if bare or len(sums.pieces) <= 1:
            values = replace(values, crc=sums.whole)
        else:
            values = replace(values, pieces=tuple(sums.pieces))
        return Written(values, ByteRange(file=file, start=self.archive_start, nbytes=nbytes, archive=True))


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint of ours; made anew for each save.

    Args:
        path: where the checkpoint shall be; nothing may be there.
        save_id: 32 hexadecimal digits, the same on all ranks or only the coordinator's; names this save.
        details: recorded in the manifest for people: versions, sizes of the worlds.
        files: the file system.
    """

    def __init__(
        self,
        path: Path,
        *,
        save_id: str,
        details: MappingProxyType[str, Any] = MappingProxyType({}),
        files: Files | None = None,
    ) -> None:
        self.path = path
        self._save_id = save_id
        self._details = details
        self._files: Files = files or LocalFiles()
        self._planned = 0
        self._directory = NewDirectory(path, save_id, self._files)
        self.index: CheckpointIndex | None = None

    @property
    def temporary(self) -> Path:
        """The directory written to until the commit."""
        return self._directory.temporary

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Refuse another target: a writer serves one save.

        Raises:
            CheckpointingException: `checkpoint_id` names another path.
        """
        if checkpoint_id is not None and Path(checkpoint_id) != self.path:
            raise CheckpointingException(f"this writer writes {self.path}; make another one for {checkpoint_id}")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint could be at `checkpoint_id`: any path of a mounted file system, no URL."""
        return "://" not in str(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Path and save id."""
        return StorageMeta(checkpoint_id=str(self.path), save_id=self._save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None:
        """Nothing to set up before the plan is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the temporary directory, remove those of dead saves, and give each rank its file; on the coordinator.

        Raises:
            CheckpointExistsError: something is at the target already.
            OSError: the directory cannot be made.
        """
        self._directory.make()
        self._planned = sum(len(plan.items) for plan in plans)
        return [
            SavePlan(plan.items, WriteTo(self.temporary, f"__{rank}_0.distcp", self._save_id), plan.planner_data)
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and sync it.

        Returns:
            One result per item, and a last one with the file's name, size and checksum.

        Raises:
            OSError: the file system refuses.
        """
        target: WriteTo = plan.storage_data
        with (
            Hasher() as hasher,
            new_file(self._files, target.directory / target.file) as fd,
        ):
            output = DataFileWriter(files=self._files, fd=fd, hasher=hasher)
            output.put(file_header(target.save_id))
            items = sorted(plan.items, key=lambda i: i.type is not WriteItemType.BYTE_IO)
            placed = [_put_item(output, item, planner) for item in items]
            whole = output.finish()
        written = [(p.item.index, p.written(target.file)) for p in placed]
        results = [WriteResult(index, w.archive.nbytes, w) for index, w in written]
        results.append(WriteResult(MetadataIndex(""), whole.size, (target.file, whole)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, then commit by renaming; on the coordinator.

        Raises:
            CheckpointingException: some planned item was not written.
            OSError: the file system refuses.
        """
        written = [result for own in results for result in own]
        items = {r.index: r.storage_data for r in written if isinstance(r.storage_data, Written)}
        files = dict(r.storage_data for r in written if not isinstance(r.storage_data, Written))
        if len(items) != self._planned:
            raise CheckpointingException(f"{len(items)} items were written, {self._planned} were planned")
        details = MappingProxyType({"paths": metadata.planner_data, **self._details})
        index = _index_of(self.path, self._save_id, metadata, items, files, details)
        for name, content in (
            (METADATA, _dcp_metadata(index, items)),
            (MEGATRON_MARK, encode_megatron_mark()),
        ):
            write_file(self._files, self.temporary / name, content)
            index.files[name] = StoredFile(size=len(content), crc=crc32(content))
        write_file(self._files, self.temporary / MANIFEST, encode_manifest(index))
        self._directory.commit()
        self.index = index

    def release(self) -> None:
        """Give up the lease on the temporary directory; called by `finish` and `abandon`."""
        self._directory.release()

    def abandon(self) -> None:
        """Remove the temporary directory of a failed save; on the coordinator, when all ranks are done."""
        self._directory.abandon()


def _put_item(output: DataFileWriter, item: WriteItem, planner: SavePlanner) -> _Placed:
    data, start = planner.resolve_data(item), output.position
    if not isinstance(data, Tensor):
        raw = data.getvalue()
        return _Placed(item, start, start + len(raw), start, len(raw), _put_small(output, memoryview(raw)))
    nbytes = data.numel() * data.element_size()
    framing = frame_tensor(data.dtype, tuple(data.shape), nbytes)
    output.put(framing.header)
    values_start = output.position
    sums = _put_values(output, data, nbytes)
    output.put_trailer(framing, sums)
    return _Placed(item, start, output.position, values_start, nbytes, sums)


def _put_values(output: DataFileWriter, data: Tensor, nbytes: int) -> ItemSums:
    """Values in row-major order; straight from memory where they lie so there, else through bounded copies."""
    if nbytes <= _SMALL_BYTES:
        return _put_small(output, bytes_view(contiguous(data)))
    sums = PieceSums()
    if is_plain_memory(data):
        item = ItemSums(sums, output.put_large(bytes_view(data), sums))
    else:
        for part in _bounded_parts(data):
            # Waiting for the sum here lets go of each copy before the next is made.
            done = output.put_large(bytes_view(contiguous(part)), sums)
            done.result()
        item = ItemSums(sums, done)
    output.end_large(item, nbytes)
    return item


def _put_small(output: DataFileWriter, view: memoryview) -> ItemSums:
    output.put(view)
    sums = PieceSums()
    sums.add(view)
    return ItemSums(sums)


def _bounded_parts(data: Tensor) -> list[Tensor]:
    """A tensor as runs of rows of at most a few hash pieces each, so that a copy of one needs little memory."""
    axis = next((d for d, n in enumerate(data.shape) if n > 1), 0)
    rows = data.shape[axis]
    row_bytes = data.numel() // rows * data.element_size()
    step = max(1, 2 * HASH_PIECE_BYTES // max(1, row_bytes))
    return [data.narrow(axis, i, min(step, rows - i)) for i in range(0, rows, step)]


def _dcp_metadata(index: CheckpointIndex, items: dict[MetadataIndex, Written]) -> bytes:
    """What stock readers find the archives by."""
    tensors = StoredTensors.of(index.tensors, index.files)
    archives = [
        items[MetadataIndex(key, chunk.box.offsets)].archive
        for key, tensor in tensors.items()
        for chunk in tensor.chunks
    ]
    starts, nbytes = (np.array([getattr(a, name) for a in archives], "<i8") for name in ("start", "nbytes"))
    objects = {item.fqn: written.archive for item, written in items.items() if item.offset is None}
    paths = {key: tuple(path) for key, path in (index.details.get("paths") or {}).items()}
    return encode_dcp_metadata(tensors, objects, list(index.files), (starts, nbytes), paths)


def _index_of(
    path: Path,
    save_id: str,
    metadata: Metadata,
    items: dict[MetadataIndex, Written],
    files: dict[str, StoredFile],
    details: MappingProxyType[str, Any],
) -> CheckpointIndex:
    tensors, objects = {}, {}
    for key, stored in metadata.state_dict_metadata.items():
        if not isinstance(stored, TensorStorageMetadata):
            objects[key] = items[MetadataIndex(key)].values
            continue
        chunks = tuple(
            StoredChunk(box=Box(tuple(c.offsets), tuple(c.sizes)), place=items[MetadataIndex(key, c.offsets)].values)
            for c in stored.chunks
        )
        tensors[key] = StoredTensor(shape=tuple(stored.size), dtype=stored.properties.dtype, chunks=chunks)
    return CheckpointIndex(
        path=path,
        kind=Kind.OURS,
        tensors=tensors,
        objects=objects,
        files=files,
        save_id=save_id,
        details={"torch": torch.__version__, **details},
    )
