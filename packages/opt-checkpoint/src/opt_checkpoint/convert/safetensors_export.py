"""Exports a sharded model as safetensors files. Every rank writes its part of every tensor to its final position.

Nothing is gathered: the shards of a rank are boxes of the exported arrays, which it writes to files that all ranks
share. One rename is the commit.
"""

from __future__ import annotations

import itertools
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from opt_checkpoint.boxes.box import Box, boxes_of, row_major_strides, split_rows
from opt_checkpoint.convert.name_boxes import Described, Piece, to_theirs
from opt_checkpoint.convert.name_rules import SAME_NAMES, NameRule, fingerprint
from opt_checkpoint.convert.safetensors_files import DEFAULT_SHARD_BYTES, FOLDER, INDEX, Layout, PlacedArray, layout_of
from opt_checkpoint.dcp.plan import Offer
from opt_checkpoint.dcp.save_planner import ShardedSavePlanner, view_of
from opt_checkpoint.dcp.tensors_of_ranks import TensorsOfRanks
from opt_checkpoint.disk.checksums import bytes_view
from opt_checkpoint.disk.data_file import DataFiles
from opt_checkpoint.disk.dtype_names import dtype_from_name
from opt_checkpoint.disk.index import CheckpointIndex, Kind
from opt_checkpoint.disk.read_region import FilePosition, Region, read_region
from opt_checkpoint.disk.torch_zip_reader import contiguous
from opt_checkpoint.errors import CheckpointMismatchError, CheckpointValueError
from opt_checkpoint.run.ranks import ranks_of, through_first
from opt_checkpoint.run.save_load import PathLike, carry_out_save
from opt_checkpoint.state.flat_state import FlatState
from opt_checkpoint.state.sharded import ShardedStateDict
from opt_checkpoint.state.tree import path_text
from opt_checkpoint.store.directory import Directory
from opt_checkpoint.store.paths import local_path

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


class _WriteTo(NamedTuple):
    """The coordinator's message to a rank.

    Args:
        folder: the temporary directory, in the parent of the target.
        pieces: of the tensors that it writes.
        tied: of all tied tensors.
        places: of the arrays that these are in.
    """

    folder: str
    pieces: dict[str, list[Piece]]
    tied: dict[str, list[Piece]]
    places: dict[str, PlacedArray]


class SafetensorsWriter:
    """Writes one export; each export needs a new one.

    Args:
        path: where the folder shall be; nothing may be there.
        export: what to write.
        save_id: 32 hexadecimal digits, the same on all ranks or only the coordinator's; names this save.
    """

    def __init__(self, path: Path, export: Export, *, save_id: str) -> None:
        self.path, self._export, self._save_id = path, export, save_id
        self._store, self._target = Directory(path.parent), path.name
        self._folder = self._store.folder(self._target, save_id)
        self._layout: Layout | None = None
        self._write_to: _WriteTo | None = None

    @property
    def temporary(self) -> Path:
        """The directory written to until the commit."""
        return self._store.path(self._folder)

    def begin(self, planner: ShardedSavePlanner) -> list[_WriteTo]:
        """On the coordinator, assign every array to a file and create the files with their headers.

        Raises:
            CheckpointingException: names or shapes do not fit the rules, or something is at the target.
            OSError: the file system reports an error.
        """
        plan, tensors = planner.plan, planner.plan.tensors
        mapped = to_theirs(self._export.names, _described(tensors))
        layout = layout_of(mapped.theirs, dtype=self._export.dtype, shard_bytes=self._export.shard_bytes)
        self._store.begin(self._target, self._save_id)
        self._store.write_small(self._folder, {file: header.raw for file, header in layout.headers.items()})
        self._layout = layout
        keys: list[dict[str, None]] = [{} for _ in range(tensors.ranks)]
        for rank, key in zip(
            plan.parts.rank.tolist(), tensors.key[tensors.owner[plan.parts.box]].tolist(), strict=True
        ):
            keys[rank][tensors.keys[key]] = None
        messages = []
        for of_rank in keys:
            pieces = {key: mapped.pieces[key] for key in of_rank if key in mapped.pieces}
            wanted = {p.theirs for some in (*pieces.values(), *mapped.tied.values()) for p in some}
            places = {name: layout.places[name] for name in wanted}
            messages.append(_WriteTo(self._folder, pieces, mapped.tied, places))
        return messages

    def write(self, to: _WriteTo, planner: ShardedSavePlanner) -> int:
        """Write this rank's boxes of all arrays and sync them; returns the number of bytes.

        Raises:
            OSError: the file system reports an error.
        """
        self._write_to = to
        by_file: dict[str, list[tuple[Tensor, Box, Piece]]] = defaultdict(list)
        for key, box, values in planner.parts():
            for piece in to.pieces.get(key, ()):
                if piece.box.overlap(box) is not None:
                    by_file[to.places[piece.theirs].file].append((values, box, piece))
        written = 0
        for file, boxes in by_file.items():
            with self._store.shared_file(f"{to.folder}/{file}") as write:
                for values, box, piece in boxes:
                    for part in _parts(values, box, piece):
                        array = to.places[piece.theirs].array
                        stored = part.stored(array.dtype)
                        written += _write_region(write, stored, part.region(), array.start)
        return written

    def finish(self, planner: ShardedSavePlanner, written: list[int]) -> None:
        """On the coordinator, write the index after all arrays.

        Raises:
            CheckpointingException: some bytes were not written.
            OSError: the file system reports an error.
        """
        assert self._layout is not None
        if sum(written) != self._layout.nbytes:
            raise CheckpointValueError(f"{sum(written)} bytes were written, {self._layout.nbytes} were planned")
        content = self._layout.encode_index()
        if content is not None:
            self._store.write_small(self._folder, {INDEX: content})

    def check_tied(self, flat: FlatState) -> None:
        """Compare this rank's tied tensors with the written values of the tensors that they are tied to.

        Raises:
            CheckpointMismatchError: the values differ.
        """
        assert self._write_to is not None
        to = self._write_to
        path = self._store.path(to.folder)
        files = DataFiles(CheckpointIndex(path=path, kind=Kind.SAFETENSORS, tensors={}, objects={}, files={}))
        for shard in flat.tensors.values():
            for piece in to.tied.get(shard.key, ()):
                for held in boxes_of(shard):
                    for part in _parts(view_of(shard, held, held.box), held.box, piece):
                        _compare(part, to.places[piece.theirs], files, shard.key)

    def commit(self) -> None:
        """On the coordinator, rename the folder to its final name after all ranks have finished."""
        self._store.commit(self._target, self._save_id, {})

    def abandon(self) -> None:
        """On the coordinator, remove the temporary directory of a failed export after all ranks have finished."""
        self._store.abandon(self._target, self._save_id)


def _described(tensors: TensorsOfRanks) -> dict[str, Described]:
    """Every tensor that ranks hold, by name."""
    described: dict[str, Described] = {}
    columns = (tensors.key.tolist(), tensors.dtype.tolist(), tensors.ndim.tolist(), tensors.shape.tolist())
    for key, dtype, ndim, shape in zip(*columns, strict=True):
        own = Described(tuple(shape[:ndim]), dtype_from_name(tensors.dtype_names[dtype]))
        described.setdefault(tensors.keys[key], own)
    return described


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
        yield _Part(box.part_of(values, part), tuple(o - b for o, b in zip(part.offsets, piece.box.offsets)), piece)


def _write_region(write: Callable[[memoryview, int], None], values: Tensor, region: Region, start: int) -> int:
    """Write a box of an array, by one call for each contiguous run of bytes; returns the number of bytes.

    Args:
        write: writes bytes to a position of the file.
        values: of the region's shape.
        region: the box.
        start: position of the array's first value in the file.
    """
    if not values.numel():
        return 0
    raw, itemsize = bytes_view(contiguous(values)), values.element_size()
    strides = row_major_strides(region.chunk)
    axes = range(len(region.sizes))
    # The box is complete along all axes after `axis`, so its part at one index of the axes before is one run.
    axis = next((d for d in reversed(axes) if region.sizes[d] != region.chunk[d]), 0)
    run_bytes = len(raw)
    for n in region.sizes[:axis]:
        run_bytes //= n
    first = start + sum(o * s for o, s in zip(region.offsets, strides)) * itemsize
    for number, index in enumerate(itertools.product(*(range(n) for n in region.sizes[:axis]))):
        position = first + sum(i * s for i, s in zip(index, strides)) * itemsize
        write(raw[number * run_bytes :][:run_bytes], position)
    return len(raw)


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


def save_safetensors(
    state: ShardedStateDict,
    folder: PathLike,
    *,
    names: Sequence[NameRule] = SAME_NAMES,
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Export a sharded model as safetensors files; all ranks call this together.

    Every element is written once, by a rank that holds it, to its position in a file that all ranks share. Names,
    shapes and coverage are checked on all ranks before anything is written. The folder appears by one rename, or not at
    all.

    Args:
        state: tensors only, as `sharded_model(model)`, or sharded tensors whose keys are the names on our side.
        folder: the target, which must not exist, on a file system that all ranks share. The same on all ranks. A single
            file is named `model.safetensors`; several are numbered, with a `model.safetensors.index.json`.
        names: rules that map our names to those of the files; equal names by default. The same on all ranks.
        dtype: what floating-point tensors are converted to; None to keep each tensor's dtype.
        shard_bytes: maximum size of a file, unless one tensor is larger.
        process_group: the ranks that hold the model.

    Raises:
        CheckpointExistsError: something is at `folder`.
        CheckpointKeyError: a tensor has no rule or several, or two would become one.
        CheckpointMismatchError: shapes do not fit a rule, or a tied tensor has other values than its partner.
        CheckpointingException: the state holds more than tensors, or shards with holes or overlaps; or ranks were given
            different arguments.
        CheckpointFailedError: a rank failed for another reason.
    """
    ranks, what = ranks_of(process_group), f"exporting to {folder}"
    export = Export(tuple(names), dtype, shard_bytes)
    planner = _TensorPlanner(state)

    def new_writer() -> SafetensorsWriter:
        target = local_path(folder, FOLDER)
        return SafetensorsWriter(target, export, save_id=uuid.uuid4().hex)

    def finish(writer: SafetensorsWriter) -> None:
        through_first(ranks, lambda: writer.check_tied(planner.flat), lambda _: writer.commit(), what)

    arguments = {"names": fingerprint(names), "dtype": dtype, "shard_bytes": shard_bytes}
    carry_out_save(ranks, planner, new_writer, what, arguments, then=finish)


class _TensorPlanner(ShardedSavePlanner):
    """Plans the save of a state that holds tensors only."""

    def describe(self, rank: int, arguments: dict[str, str]) -> Offer:
        offer = super().describe(rank, arguments)
        others = [path_text(path) for path in (*self.flat.objects, *self.flat.common)]
        if others:
            raise CheckpointValueError(
                f"safetensors files hold tensors only; leave {', '.join(others[:8])} out of the state"
            )
        return offer
