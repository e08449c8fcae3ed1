"""The storage writer: one file per rank, checksums while writing, one step as the commit.

A save is written to a temporary location (`disk.save_target`). Every rank writes and syncs its own file. The
coordinator adds `.metadata`, for stock readers, and the manifest, and then commits. Before the commit the checkpoint
does not exist; after it, the checkpoint is complete.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opt_checkpoint.dcp.save_planner import Planned, ShardedSavePlanner
from opt_checkpoint.dcp.written import WrittenFile, paths_of, stored_by
from opt_checkpoint.disk.checksums import HASH_PIECE_BYTES, PieceSums, bytes_view, crc32
from opt_checkpoint.disk.data_file import file_header
from opt_checkpoint.disk.data_file_writer import DataFileWriter, ItemSums
from opt_checkpoint.disk.dcp_metadata import MEGATRON_MARK, METADATA, encode_megatron_mark
from opt_checkpoint.disk.dcp_metadata_writer import encode_dcp_metadata
from opt_checkpoint.disk.files import Files, LocalFiles
from opt_checkpoint.disk.hasher import Hasher
from opt_checkpoint.disk.index import ByteRange, CheckpointIndex, Kind, StoredFile
from opt_checkpoint.disk.manifest import MANIFEST, encode_manifest
from opt_checkpoint.disk.object_target import target_of
from opt_checkpoint.disk.read_region import is_plain_memory
from opt_checkpoint.disk.torch_zip_reader import contiguous
from opt_checkpoint.disk.torch_zip_writer import frame_tensor
from opt_checkpoint.objects.path import Location

_SMALL_BYTES = 256 << 10
_UNKNOWN_CRC = 0  # in the archive of a large tensor, whose checksums are in the manifest
ALIGNMENT = 64  # of stored values in their file, as of tensors in memory


class WriteTo(NamedTuple):
    """The parts that a rank writes, sent to it by the coordinator."""

    file: str
    save_id: str


class _Placed(NamedTuple):
    """One item in the file; `values_start` is -1 for an object. Checksums of a large tensor may not be ready yet."""

    key: str
    archive_start: int
    archive_end: int
    values_start: int
    sums: int | ItemSums

    @property
    def pieces(self) -> list[int]:
        """The checksum of every piece, after waiting for them."""
        return [self.sums] if isinstance(self.sums, int) else self.sums.settled().pieces


class CheckpointWriter:
    """Writes one checkpoint. Each save needs a new writer.

    Args:
        path: the target, which must not exist.
        save_id: 32 hexadecimal digits, the same on all ranks or only the coordinator's; names this save.
        details: recorded in the manifest for people: versions, sizes of the worlds.
        files: the file system.
        replace: whether the commit replaces a checkpoint that is at `path`.
    """

    def __init__(
        self,
        path: Location,
        *,
        save_id: str,
        details: MappingProxyType[str, Any] = MappingProxyType({}),
        files: Files | None = None,
        replace: bool = False,
    ) -> None:
        self.path = path
        self._save_id = save_id
        self._details = details
        self._files: Files = files or LocalFiles()
        self._target = target_of(path, save_id, self._files, replace=replace)
        self._planned: Planned | None = None
        self.index: CheckpointIndex | None = None

    @property
    def temporary(self) -> Location:
        """The directory that is written to until the commit."""
        return self._target.temporary

    def begin(self, planned: Planned) -> list[WriteTo]:
        """Create the temporary location and name the files; on the coordinator. Raises like `SaveTarget.begin`."""
        self._target.begin()
        self._planned = planned
        return [WriteTo(f"__{rank}_0.distcp", self._save_id) for rank in range(len(planned.objects))]

    def write_data(self, to: WriteTo, planner: ShardedSavePlanner) -> WrittenFile:
        """Write this rank's file and sync it.

        Raises:
            OSError: the file system reports an error.
        """
        target = target_of(self.path, to.save_id, self._files)
        with Hasher() as hasher, target.new_file(to.file) as file:
            output = DataFileWriter(output=file, hasher=hasher)
            output.put(file_header(to.save_id))
            placed = [_put_object(output, key, raw) for key, raw in planner.objects()]
            placed += [_put_tensor(output, key, values) for key, _, values in planner.parts()]
            whole = output.finish()
        return _written_file(to.file, whole, planner.assigned.crc, placed)

    def finish(self, written: list[WrittenFile]) -> None:
        """On the coordinator, write the manifest and commit.

        Raises:
            CheckpointingException: a planned item was not written; see also `SaveTarget.commit`.
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
        self._target.write_files({**contents, MANIFEST: encode_manifest(index)})
        self._target.commit(index)
        self.index = index

    def release(self) -> None:
        """Release the lease on the temporary location; called by `finish` and `abandon`."""
        self._target.release()

    def abandon(self) -> None:
        """Remove the files of a failed save; on the coordinator, once all ranks have finished."""
        self._target.abandon()


def _put_object(output: DataFileWriter, key: str, raw: bytes) -> _Placed:
    start = output.position
    output.put(raw)
    return _Placed(key, start, output.position, -1, crc32(raw))


def _put_tensor(output: DataFileWriter, key: str, data: Tensor) -> _Placed:
    """Write the archive of a tensor, preceded by zeros that align its values."""
    nbytes = data.numel() * data.element_size()
    framing = frame_tensor(data.dtype, tuple(data.shape))
    gap = -(output.position + len(framing.header)) % ALIGNMENT
    start = output.position + gap
    values_start = start + len(framing.header)
    if nbytes <= _SMALL_BYTES:
        view = bytes_view(data if is_plain_memory(data) else contiguous(data))
        crc = crc32(view)
        output.put(b"".join((bytes(gap), framing.header, view, framing.trailer(crc))))
        return _Placed(key, start, output.position, values_start, crc)
    output.put(bytes(gap) + framing.header)
    sums = _put_values(output, data, nbytes)
    output.put(framing.trailer(_UNKNOWN_CRC))
    return _Placed(key, start, output.position, values_start, sums)


def _written_file(name: str, whole: StoredFile, parts_crc: int, placed: list[_Placed]) -> WrittenFile:
    """The columns of a file: tensors in order, objects by key."""
    tensors = [p for p in placed if p.values_start >= 0]
    start = np.array([p.archive_start for p in tensors], "<i8")
    return WrittenFile(
        name=name,
        whole=whole,
        parts_crc=parts_crc,
        start=np.array([p.values_start for p in tensors], "<i8"),
        archive_start=start,
        archive_nbytes=np.array([p.archive_end for p in tensors], "<i8") - start,
        sums=np.array([s for p in tensors for s in p.pieces], "<u4"),
        objects={p.key: _object_place(name, p) for p in placed if p.values_start < 0},
    )


def _object_place(file: str, placed: _Placed) -> ByteRange:
    (crc,) = placed.pieces
    nbytes = placed.archive_end - placed.archive_start
    return ByteRange(file=file, start=placed.archive_start, nbytes=nbytes, crc=crc, archive=True)


def _put_values(output: DataFileWriter, data: Tensor, nbytes: int) -> ItemSums:
    """Write values in row-major order: directly if they are stored in this order, else through bounded copies."""
    sums = PieceSums()
    if is_plain_memory(data):
        item = ItemSums(sums, output.put_large(bytes_view(data), sums))
    else:
        for part in _bounded_parts(data):
            # Waiting for the checksum here frees each copy before the next is made.
            done = output.put_large(bytes_view(contiguous(part)), sums)
            done.result()
        item = ItemSums(sums, done)
    output.end_large(item, nbytes)
    return item


def _bounded_parts(data: Tensor) -> list[Tensor]:
    """Runs of rows of a tensor, each of a few hash pieces at most, so that a copy of one needs little memory."""
    axis = next((d for d, n in enumerate(data.shape) if n > 1), 0)
    rows = data.shape[axis]
    row_bytes = data.numel() // rows * data.element_size()
    step = max(1, 2 * HASH_PIECE_BYTES // max(1, row_bytes))
    return [data.narrow(axis, i, min(step, rows - i)) for i in range(0, rows, step)]
