"""What is written in a save: a file by each rank; then, by rank 0, the index of all files.

Each rank writes and syncs a file of its own in the folder of the save, `__<rank>_0.distcp`. Rank 0 adds `.metadata`,
for stock readers, `metadata.json`, for Megatron-Core's, and the manifest, and commits. While a directory is written,
rank 0 also keeps a lease in it (`store.lease`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from opt_checkpoint.boxes import Array
from opt_checkpoint.dcp.saving import Assigned, Taken
from opt_checkpoint.disk.data_file import crc32, file_header
from opt_checkpoint.disk.data_file_writer import DataFileWriter
from opt_checkpoint.disk.foreign import MEGATRON_MARK, MEGATRON_MARKED, METADATA
from opt_checkpoint.disk.index import (
    COMMON_KEY,
    PATHS,
    PIECE_BYTES,
    ByteRange,
    CheckpointIndex,
    Kind,
    StoredFile,
    StoredTensors,
)
from opt_checkpoint.disk.manifest import encode_manifest
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.state.sharded import Path
from opt_checkpoint.store import MANIFEST, Location, Store


class WrittenFile(NamedTuple):
    """The data file of a rank. Rows have the order of the parts assigned to the rank.

    Args:
        name: file name within the checkpoint's directory.
        stored: its size and checksum.
        parts_crc: checksum of the parts assigned to the rank, which identifies them.
        places: (p, 3) start of the values of each part, start and size of the archive around them, int64.
        sums: the CRC-32 of every piece of each part, uint32.
        objects: the places of the objects, by unique key.
    """

    name: str
    stored: StoredFile
    parts_crc: int
    places: Array
    sums: Array
    objects: dict[str, ByteRange]


@dataclass
class CheckpointWriter:
    """Writes one checkpoint. Each save needs a new writer.

    Args:
        path: the target, which must not exist.
        store: contains it.
        target: its name in the store.
        save_id: 32 hexadecimal digits that name this save; rank 0's counts.
        details: recorded in the manifest for people: versions, sizes of the worlds.
        replace: whether the commit replaces a checkpoint that is at `path`.
        committed: called on rank 0 after the commit.
    """

    path: Location
    store: Store
    target: str
    save_id: str
    details: Mapping[str, Any]
    replace: bool = False
    committed: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self._folder = self.store.folder(self.target, self.save_id)  # rank 0's counts

    def begin(self, assigned: Assigned) -> list[str]:
        """Create the temporary location, on rank 0; return the save id for each rank. Raises like `Store.begin`."""
        self.store.begin(self.target, self._folder, replace=self.replace)
        return [self.save_id] * len(assigned.to_ranks)

    def write(self, save_id: str, taken: Taken) -> WrittenFile:
        """Write this rank's file and sync it.

        Raises:
            OSError: the file system reports an error.
        """
        name = f"__{taken.held.rank}_0.distcp"
        tensors = lambda: (values for _, _, values in taken.parts())
        output = DataFileWriter(name, file_header(save_id), taken.objects, tensors)
        self.store.write(f"{self.store.folder(self.target, save_id)}/{name}", output)
        places = np.array(output.places, "<i8").reshape(-1, 3)
        sums = np.array(list(chain.from_iterable(output.value_sums)), "<u4")
        return WrittenFile(name, output.written(), taken.own_parts.crc, places, sums, output.placed_objects)

    def finish(self, assigned: Assigned, written: Sequence[WrittenFile]) -> None:
        """Write the index and commit, on rank 0.

        Raises:
            CheckpointingException: a planned item was not written; see also `Store.commit`.
            OSError: the file system reports an error.
        """
        # Imports torch.distributed.checkpoint, which takes half a second.
        from opt_checkpoint.disk.dcp_metadata_writer import encode_dcp_metadata

        files = {file.name: file.stored for file in written}
        tensors, archives = index_of(assigned, written, files)
        archived: dict[str, ByteRange] = {}
        for file in written:
            archived |= file.objects
        objects = {key: place for key, place in archived.items() if key not in assigned.stock}
        paths: dict[str, Path] = {}
        for layout in assigned.plan.layouts:
            paths |= layout.plain
        index = CheckpointIndex(
            path=self.path,
            kind=Kind.OURS,
            tensors=tensors,
            objects=objects,
            files=files,
            save_id=self.save_id,
            details={"torch": torch.__version__, PATHS: paths, **self.details},
        )
        contents = {
            METADATA: encode_dcp_metadata(tensors, archived, list(files), archives, paths),
            MEGATRON_MARK: MEGATRON_MARKED,
        }
        for name, raw in contents.items():
            index.files[name] = StoredFile(size=len(raw), crc=crc32(raw))
        contents[MANIFEST] = encode_manifest(index)
        self.store.write_small(self._folder, contents)
        sizes = {name: file.size for name, file in index.files.items()}
        sizes[MANIFEST] = len(contents[MANIFEST])
        self.store.check_files(self._folder, sizes)
        self.store.commit(self.target, self._folder, replace=self.replace)
        self.committed()

    def abandon(self) -> None:
        """Remove the files of a failed save, on rank 0, once all ranks have finished."""
        self.store.abandon(self._folder)


def index_of(
    assigned: Assigned, written: Sequence[WrittenFile], files: Mapping[str, StoredFile]
) -> tuple[StoredTensors, Array]:
    """Return the stored tensors, sorted by key, and the archives of their chunks.

    A part of the plan is a chunk of the index: sorted by key, and within a key in the order of the plan.

    Args:
        assigned: what every rank was to write.
        written: what it has written, by rank.
        files: size and checksum of the ranks' files, by name, in their order.

    Returns:
        The tensors; and (chunks, 2) start and size of the archive of each chunk, in the order of their columns.

    Raises:
        CheckpointingException: a rank has not written exactly what was planned.
    """
    tensors = assigned.plan.tensors
    parts = assigned.plan.parts
    itemsize = tensors.itemsize[tensors.owner[parts.box]]  # (parts,)
    nbytes = np.prod(parts.sizes, axis=1) * itemsize
    sums_of_part = np.maximum(1, -(-nbytes // PIECE_BYTES))  # (parts,) number of checksums
    sums_of_rank = np.bincount(parts.rank, weights=sums_of_part, minlength=len(written)).tolist()
    for rank, (file, own) in enumerate(zip(written, assigned.plan.assigned, strict=True)):
        objects = set(own.objects)
        if rank == 0:
            objects |= {COMMON_KEY, *assigned.stock}
        found = (file.parts_crc, len(file.places), len(file.sums), set(file.objects))
        if found != (own.crc, len(own.box), sums_of_rank[rank], objects):
            raise CheckpointValueError(
                f"rank {rank} has not written the {len(own.box)} parts and {len(objects)} objects that were planned"
            )
    # (keys,) numbers of the keys in the plan, in the order of the index; and the inverse permutation
    numbers = range(len(tensors.keys))
    sorted_keys = np.array(sorted(numbers, key=tensors.keys.__getitem__), np.int64)
    place_of_key = np.argsort(sorted_keys)
    first = tensors.first_of_key[sorted_keys]  # (keys,) a tensor of each key
    place_of_part = place_of_key[tensors.box_key[parts.box]]  # (parts,)
    order = np.argsort(place_of_part, kind="stable")  # (parts,) the parts, in the order of the index
    places = np.concatenate([file.places for file in written])[order]  # (parts, 3)
    sums = np.concatenate([file.sums for file in written])  # (all sums,) in the order of the plan
    raw_keys = [tensors.keys[number].encode("utf-8", "surrogatepass") for number in sorted_keys.tolist()]
    dtypes = sorted(tensors.dtype_names)
    new_dtype = np.array([dtypes.index(name) for name in tensors.dtype_names])  # (dtypes,)
    columns = {
        "keys": np.frombuffer(b"".join(raw_keys), "|u1"),
        "key_bytes": np.fromiter(map(len, raw_keys), "<u4", len(raw_keys)),
        "dtype": new_dtype[tensors.dtype[first]].astype("|u1"),
        "ndim": tensors.ndim[first].astype("|u1"),
        "shape": tensors.shape[first],
    }
    columns |= {  # of chunks, except for the first
        "chunks": np.bincount(place_of_part, minlength=len(sorted_keys)),
        "offsets": parts.offsets[order],
        "sizes": parts.sizes[order],
        "file": parts.rank[order].astype("<u4"),
        "start": places[:, 0],
        "sums": reorder_runs(sums, sums_of_part, order),
    }
    return StoredTensors(columns, tuple(dtypes), files), places[:, 1:]


def reorder_runs(values: Array, lengths: Array, order: Array) -> Array:
    """Return an array that consists of runs, one for each part, with the parts in another order.

    Args:
        values: (sum of lengths,) the runs, one after another.
        lengths: (parts,) number of values in each run.
        order: (parts,) the part that each new run is of, a permutation.
    """
    starts = np.cumsum(lengths) - lengths  # (parts,) where each run begins
    new_lengths = lengths[order]  # (parts,)
    new_starts = np.cumsum(new_lengths) - new_lengths  # (parts,) where each run is to begin
    shift = np.repeat(starts[order] - new_starts, new_lengths)  # (sum of lengths,) from each new place to the old one
    moved: Array = values[np.arange(len(values)) + shift]
    return moved
