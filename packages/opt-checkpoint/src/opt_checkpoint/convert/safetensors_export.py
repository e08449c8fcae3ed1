"""A sharded model as safetensors files: every rank writes its part of every tensor straight to its place.

Nothing is gathered: a rank's shards are boxes of the exported arrays, which it writes into files that all ranks share.
"""

from __future__ import annotations

import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from opt_checkpoint.boxes.box import Box, boxes_of, split_rows
from opt_checkpoint.convert.name_boxes import Described, Piece, to_theirs
from opt_checkpoint.convert.name_rules import SAME_NAMES, NameRule
from opt_checkpoint.convert.safetensors_layout import DEFAULT_SHARD_BYTES, INDEX, Layout, PlacedArray, layout_of
from opt_checkpoint.dcp.global_plan import GlobalPlan
from opt_checkpoint.dcp.held_tensors import HeldTensors
from opt_checkpoint.dcp.save_planner import ShardedSavePlanner, view_of
from opt_checkpoint.disk.checksums import bytes_view
from opt_checkpoint.disk.data_file import DataFiles
from opt_checkpoint.disk.dtype_names import dtype_from_name
from opt_checkpoint.disk.files import Files, LocalFiles, shared_file, write_file
from opt_checkpoint.disk.index import CheckpointIndex, Kind
from opt_checkpoint.disk.new_directory import NewDirectory
from opt_checkpoint.disk.read_region import FilePosition, Region, read_region
from opt_checkpoint.disk.torch_zip_reader import contiguous
from opt_checkpoint.disk.write_region import write_region
from opt_checkpoint.errors import CheckpointingException, CheckpointMismatchError
from opt_checkpoint.run.ranks import agreed, everyone, ranks_of, same_everywhere
from opt_checkpoint.run.save_load import PathLike, carry_out_save, error_of
from opt_checkpoint.state.flat_state import FlatState
from opt_checkpoint.state.sharded import ShardedStateDict
from opt_checkpoint.state.tree import path_text

_COPY_BYTES = 64 << 20  # of a tensor that is converted, transposed, or on a device, at a time


def save_safetensors(
    state: ShardedStateDict,
    folder: PathLike,
    *,
    names: Sequence[NameRule] = SAME_NAMES,
    dtype: torch.dtype | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    process_group: dist.ProcessGroup | None = None,
    files: Files | None = None,
) -> None:
    """Export a sharded model as safetensors files; all ranks call this together.

    Every element is written once, by a rank that holds it, to its place in a file that all ranks share. Names, shapes
    and coverage are checked on all ranks before anything is written; the folder appears by one rename, or not at all.

    Args:
        state: tensors only, as `sharded_model(model)`, or sharded tensors whose keys are the names on our side.
        folder: where to, on a file system that all ranks share; nothing may be there. The same on all ranks. One file
            is called `model.safetensors`; several are numbered and have `model.safetensors.index.json` beside them.
        names: which of our tensors are which of theirs; equal names by default. The same on all ranks.
        dtype: what floating-point tensors are converted to; None to keep each tensor's dtype.
        shard_bytes: largest file, unless one tensor is larger.
        process_group: the ranks that hold the model.
        files: the file system; the local one by default.

    Raises:
        CheckpointExistsError: something is at `folder`.
        CheckpointKeyError: a tensor has no rule or several, or two would become one.
        CheckpointMismatchError: shapes do not fit a rule, or a tied tensor has other values than its partner.
        CheckpointingException: the state holds more than tensors, or shards with holes or overlaps; or ranks were given
            different arguments.
        CheckpointFailedError: a rank failed otherwise.
    """
    ranks, target, what = ranks_of(process_group), Path(folder).absolute(), f"exporting to {folder}"
    same_everywhere(ranks, what, folder=target, names=tuple(map(repr, names)), dtype=dtype, shard_bytes=shard_bytes)
    export = _Export(tuple(names), dtype, shard_bytes)
    writer = SafetensorsWriter(target, export, save_id=uuid.uuid4().hex, files=files or LocalFiles())
    planner = _TensorPlanner(ShardedSavePlanner(state))

    def finish() -> None:
        everyone(ranks, error_of(lambda: writer.check_tied(planner.flat)), what)
        agreed(ranks, writer.commit, what)

    carry_out_save(ranks, planner, writer, what, then=finish)


class _Export(NamedTuple):
    """What to write.

    Args:
        names: which of our tensors are which of theirs.
        dtype: of floating-point tensors.
        shard_bytes: largest file.
    """

    names: tuple[NameRule, ...]
    dtype: torch.dtype | None
    shard_bytes: int


class _TensorPlanner(SavePlanner):
    """Plans the save of a state that holds tensors only."""

    def __init__(self, planner: ShardedSavePlanner) -> None:
        self._planner = planner

    @property
    def flat(self) -> FlatState:
        """The state taken apart."""
        return self._planner.flat

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._planner.set_up_planner(state_dict, storage_meta, is_coordinator)
        others = [path_text(path) for path in (*self.flat.objects, *self.flat.common)]
        if others:
            raise CheckpointingException(
                f"safetensors files hold tensors only; leave {', '.join(others[:8])} out of the state"
            )

    def create_local_plan(self) -> SavePlan:
        return self._planner.create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = self._planner.create_global_plan(all_plans)
        plan: GlobalPlan = metadata.planner_data.plan
        described = _described(plan.held)
        names = [plan.held.keys[key] for key in plan.held.key[plan.held.owner[plan.parts.box]].tolist()]
        keys: list[dict[str, None]] = [{} for _ in plans]
        for rank, name in zip(plan.parts.rank.tolist(), names, strict=True):
            keys[rank][name] = None
        return [
            SavePlan([], _Planned(described, list(own)), one.planner_data) for one, own in zip(plans, keys, strict=True)
        ], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = self._planner.finish_plan(new_plan)
        tensors = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        return SavePlan(tensors, plan.storage_data, plan.planner_data)

    def box_of(self, write_item: WriteItem) -> Box:
        """The box of its tensor that an item is."""
        assert write_item.index.index is not None
        return self._planner.part_of(write_item.index.index)

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._planner.resolve_data(write_item)


class _Planned(NamedTuple):
    """What the coordinator plans for a rank.

    Args:
        described: all tensors, by our names.
        keys: those that this rank writes.
    """

    described: dict[str, Described]
    keys: list[str]


def _described(held: HeldTensors) -> dict[str, Described]:
    """Every tensor that ranks hold, by name."""
    described: dict[str, Described] = {}
    for key, dtype, ndim, shape in zip(held.key.tolist(), held.dtype.tolist(), held.ndim.tolist(), held.shape.tolist()):
        own = Described(tuple(shape[:ndim]), dtype_from_name(held.dtype_names[dtype]))
        described.setdefault(held.keys[key], own)
    return described


class _WriteTo(NamedTuple):
    """What a rank needs to know: sent to it by the coordinator.

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
    """Writes one export; made anew for each.

    Args:
        path: where the folder shall be; nothing may be there.
        export: what to write.
        save_id: 32 hexadecimal digits, the same on all ranks or only the coordinator's; names this save.
        files: the file system.
    """

    def __init__(self, path: Path, export: _Export, *, save_id: str, files: Files) -> None:
        self._export, self._files = export, files
        self._directory = NewDirectory(path, save_id, files)
        self._layout: Layout | None = None
        self._write_to: _WriteTo | None = None

    @property
    def temporary(self) -> Path:
        """The directory written to until the commit."""
        return self._directory.temporary

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a writer serves one export."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether an export could be at `checkpoint_id`: any path of a mounted file system, no URL."""
        return "://" not in str(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None:
        """Nothing to set up before the plan is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Decide where every array is, and make its file with its header; on the coordinator.

        Raises:
            CheckpointingException: names or shapes do not fit the rules, or something is at the target.
            OSError: the file system refuses.
        """
        planned: list[_Planned] = [plan.storage_data for plan in plans]
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
            OSError: the file system refuses.
        """
        to: _WriteTo = plan.storage_data
        self._write_to = to
        box_of: Callable[[WriteItem], Box] = planner.box_of  # type: ignore[attr-defined]
        by_file: dict[str, list[tuple[WriteItem, Piece]]] = defaultdict(list)
        for item in plan.items:
            for piece in to.pieces.get(item.index.fqn, ()):
                if piece.box.overlap(box_of(item)) is not None:
                    by_file[to.places[piece.theirs].file].append((item, piece))
        written = 0
        for file, parts in by_file.items():
            with shared_file(self._files, to.directory / file) as fd:
                for item, piece in parts:
                    values = planner.resolve_data(item)
                    assert isinstance(values, Tensor)
                    for part in _parts(values, box_of(item), piece):
                        array = to.places[piece.theirs].array
                        stored = part.stored(array.dtype)
                        written += write_region(self._files, fd, stored, part.region(), array.start)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(""), written, written)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, which comes last; on the coordinator.

        Raises:
            CheckpointingException: some bytes were not written.
            OSError: the file system refuses.
        """
        assert self._layout is not None
        written = sum(result.storage_data for own in results for result in own)
        if written != self._layout.nbytes:
            raise CheckpointingException(f"{written} bytes were written, {self._layout.nbytes} were planned")
        content = self._layout.encode_index()
        if content is not None:
            write_file(self._files, self.temporary / INDEX, content)

    def check_tied(self, flat: FlatState) -> None:
        """Compare this rank's tied tensors with what was written for their partners.

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
        """Make the folder appear; on the coordinator, when all ranks are done."""
        self._directory.commit()

    def abandon(self) -> None:
        """Remove the temporary directory of a failed export; on the coordinator, when all ranks are done."""
        self._directory.abandon()


class _Part(NamedTuple):
    """A box of values that a rank holds, within one piece.

    Args:
        values: the values.
        offsets: where they begin, counted from the piece's box.
        piece: the piece.
    """

    values: Tensor
    offsets: tuple[int, ...]
    piece: Piece

    def region(self) -> Region:
        """Their place in the array."""
        return self.piece.within.region(self.offsets, tuple(self.values.shape))

    def stored(self, dtype: torch.dtype) -> Tensor:
        """The values as they are stored: converted, on the CPU, and with the axes of the array."""
        return contiguous(self.piece.within.as_stored(self.values.to(dtype)))


def _parts(values: Tensor, box: Box, piece: Piece) -> Iterator[_Part]:
    """The values of `box` that are in a piece, a few megabytes at a time."""
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
            f"{key} is tied to {part.piece.theirs} and has other values; give it a rule of its own"
        )
