"""The storage writer of exports. All ranks write to shared files at fixed positions; one rename is the commit."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from opt_checkpoint.boxes.box import Box, boxes_of, split_rows
from opt_checkpoint.convert.name_boxes import Described, Piece, to_theirs
from opt_checkpoint.convert.name_rules import NameRule
from opt_checkpoint.convert.safetensors_layout import INDEX, Layout, PlacedArray, layout_of
from opt_checkpoint.dcp.save_planner import view_of
from opt_checkpoint.disk.checksums import bytes_view
from opt_checkpoint.disk.data_file import DataFiles
from opt_checkpoint.disk.files import Files, shared_file, write_file
from opt_checkpoint.disk.index import CheckpointIndex, Kind
from opt_checkpoint.disk.new_directory import NewDirectory
from opt_checkpoint.disk.read_region import FilePosition, Region, read_region
from opt_checkpoint.disk.torch_zip_reader import contiguous
from opt_checkpoint.disk.write_region import write_region
from opt_checkpoint.errors import CheckpointingException, CheckpointMismatchError
from opt_checkpoint.state.flat_state import FlatState

_COPY_BYTES = 64 << 20  # of a tensor that is converted, transposed, or on a device, at a time


class Export(NamedTuple):
    """Options of an export.

    Args:
        names: rules that map our names to those of the files.
        dtype: what floating-point tensors are converted to; None to keep each tensor's dtype.
        shard_bytes: maximum size of a file, unless one tensor is larger.
    """

    names: tuple[NameRule, ...]
    dtype: torch.dtype | None
    shard_bytes: int


class RankPlan(NamedTuple):
    """The coordinator's plan for a rank.

    Args:
        described: all tensors, by our names.
        keys: those that this rank writes.
    """

    described: dict[str, Described]
    keys: list[str]


class _WriteTo(NamedTuple):
    """The coordinator's message to a rank.

    Args:
        directory: the temporary directory.
        pieces: of the tensors that it writes.
        tied: of all tied tensors.
        places: of the arrays that these are in.
    """

    directory: Path
    pieces: dict[str, list[Piece]]
    tied: dict[str, list[Piece]]
    places: dict[str, PlacedArray]


class SafetensorsWriter(StorageWriter):
    """Writes one export; each export needs a new one.

    Args:
        path: where the folder shall be; nothing may be there.
        export: what to write.
        save_id: 32 hexadecimal digits, the same on all ranks or only the coordinator's; names this save.
        files: the file system.
    """

    def __init__(self, path: Path, export: Export, *, save_id: str, files: Files) -> None:
        self._export, self._files = export, files
        self._directory = NewDirectory(path, save_id, files)
        self._layout: Layout | None = None
        self._write_to: _WriteTo | None = None

    @property
    def temporary(self) -> Path:
        """The directory written to until the commit."""
        return self._directory.temporary

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer serves one export."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` is a valid target: any path of a mounted file system, but no URL."""
        return "://" not in str(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None:
        """Do nothing: the plan must be known first."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, assign every array to a file and create the files with their headers.

        Raises:
            CheckpointingException: names or shapes do not fit the rules, or something is at the target.
            OSError: the file system reports an error.
        """
        planned: list[RankPlan] = [plan.storage_data for plan in plans]
        mapped = to_theirs(self._export.names, planned[0].described)
        layout = layout_of(mapped.theirs, dtype=self._export.dtype, shard_bytes=self._export.shard_bytes)
        self._directory.make()
        for file, header in layout.headers.items():
            write_file(self._files, self.temporary / file, header.raw)
        self._layout = layout
        prepared = []
        for plan, own in zip(plans, planned, strict=True):
            pieces = {key: mapped.pieces[key] for key in own.keys if key in mapped.pieces}
            wanted = {p.theirs for some in (*pieces.values(), *mapped.tied.values()) for p in some}
            places = {name: layout.places[name] for name in wanted}
            to = _WriteTo(self.temporary, pieces, mapped.tied, places)
            prepared.append(SavePlan(plan.items, to, plan.planner_data))
        return prepared

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's boxes of all arrays and sync them.

        Raises:
            OSError: the file system reports an error.
        """
        to: _WriteTo = plan.storage_data
        self._write_to = to
        by_file: dict[str, list[tuple[WriteItem, Piece]]] = defaultdict(list)
        for item in plan.items:
            for piece in to.pieces.get(item.index.fqn, ()):
                if piece.box.overlap(_box_of(item)) is not None:
                    by_file[to.places[piece.theirs].file].append((item, piece))
        written = 0
        for file, parts in by_file.items():
            with shared_file(self._files, to.directory / file) as fd:
                for item, piece in parts:
                    values = planner.resolve_data(item)
                    assert isinstance(values, Tensor)
                    for part in _parts(values, _box_of(item), piece):
                        array = to.places[piece.theirs].array
                        stored = part.stored(array.dtype)
                        written += write_region(self._files, fd, stored, part.region(), array.start)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(""), written, written)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, write the index after all arrays.

        Raises:
            CheckpointingException: some bytes were not written.
            OSError: the file system reports an error.
        """
        assert self._layout is not None
        written = sum(result.storage_data for own in results for result in own)
        if written != self._layout.nbytes:
            raise CheckpointingException(f"{written} bytes were written, {self._layout.nbytes} were planned")
        content = self._layout.encode_index()
        if content is not None:
            write_file(self._files, self.temporary / INDEX, content)

    def check_tied(self, flat: FlatState) -> None:
        """Compare this rank's tied tensors with the written values of the tensors that they are tied to.

        Raises:
            CheckpointMismatchError: the values differ.
        """
        assert self._write_to is not None
        to = self._write_to
        index = CheckpointIndex(path=to.directory, kind=Kind.SAFETENSORS, tensors={}, objects={}, files={})
        with DataFiles(index) as files:
            for shard in flat.tensors.values():
                for piece in to.tied.get(shard.key, ()):
                    for held in boxes_of(shard):
                        place = to.places[piece.theirs]
                        for part in _parts(view_of(shard, held, held.box), held.box, piece):
                            _compare(part, place, files, shard.key)

    def commit(self) -> None:
        """On the coordinator, rename the folder to its final name after all ranks have finished."""
        self._directory.commit()

    def abandon(self) -> None:
        """On the coordinator, remove the temporary directory of a failed export after all ranks have finished."""
        self._directory.abandon()


def _box_of(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


class _Part(NamedTuple):
    """A box of values that a rank holds, within one piece.

    Args:
        values: the values.
        offsets: their start, relative to the piece's box.
        piece: the piece.
    """

    values: Tensor
    offsets: tuple[int, ...]
    piece: Piece

    def region(self) -> Region:
        """The position of the values in the array."""
        return self.piece.within.region(self.offsets, tuple(self.values.shape))

    def stored(self, dtype: torch.dtype) -> Tensor:
        """The values in stored form: converted, on the CPU, and with the axes of the array."""
        return contiguous(self.piece.within.as_stored(self.values.to(dtype)))


def _parts(values: Tensor, box: Box, piece: Piece) -> Iterator[_Part]:
    """The values of `box` in a piece, a few megabytes at a time."""
    shared = piece.box.overlap(box)
    if shared is None:
        return
    nbytes = shared.numel * values.element_size()
    for part in split_rows(shared, -(-nbytes // _COPY_BYTES)):
        view = values
        for axis, (offset, base, size) in enumerate(zip(part.offsets, box.offsets, part.sizes)):
            view = view.narrow(axis, offset - base, size)
        yield _Part(view, tuple(o - b for o, b in zip(part.offsets, piece.box.offsets)), piece)


def _compare(part: _Part, place: PlacedArray, files: DataFiles, key: str) -> None:
    own = part.stored(place.array.dtype)
    written = torch.empty_like(own)
    region = part.region()
    start = place.array.start + region.span.start * own.element_size()
    read_region(written, region, own.dtype, FilePosition(files[place.file], start))
    if bytes_view(own) != bytes_view(written):
        raise CheckpointMismatchError(
            f"{key} is tied to {part.piece.theirs} but its values differ; add a separate rule for it"
        )
