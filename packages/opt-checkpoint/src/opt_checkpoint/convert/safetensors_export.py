"""Exports a sharded model as safetensors files. Every rank writes its part of every tensor to its final position.

Nothing is gathered: the shards of a rank are boxes of the exported arrays, which it writes to files that all ranks
share.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from opt_checkpoint.convert.name_boxes import Described
from opt_checkpoint.convert.name_rules import SAME_NAMES, NameRule, fingerprint
from opt_checkpoint.convert.safetensors_layout import DEFAULT_SHARD_BYTES, FOLDER
from opt_checkpoint.convert.safetensors_writer import Export, RankPlan, SafetensorsWriter
from opt_checkpoint.dcp.global_plan import GlobalPlan
from opt_checkpoint.dcp.held_tensors import HeldTensors
from opt_checkpoint.dcp.save_planner import ShardedSavePlanner
from opt_checkpoint.disk.dtype_names import dtype_from_name
from opt_checkpoint.disk.files import Files, LocalFiles
from opt_checkpoint.errors import CheckpointingException
from opt_checkpoint.objects.path import local_path
from opt_checkpoint.run.ranks import agreed, everyone, ranks_of, same_everywhere
from opt_checkpoint.run.save_load import PathLike, carry_out_save, error_of
from opt_checkpoint.state.flat_state import FlatState
from opt_checkpoint.state.sharded import ShardedStateDict
from opt_checkpoint.state.tree import path_text


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
        files: the file system; the local one by default.

    Raises:
        CheckpointExistsError: something is at `folder`.
        CheckpointKeyError: a tensor has no rule or several, or two would become one.
        CheckpointMismatchError: shapes do not fit a rule, or a tied tensor has other values than its partner.
        CheckpointingException: the state holds more than tensors, or shards with holes or overlaps; or ranks were given
            different arguments.
        CheckpointFailedError: a rank failed for another reason.
    """
    ranks, given, what = ranks_of(process_group), Path(str(folder)).absolute(), f"exporting to {folder}"
    same_everywhere(ranks, what, folder=given, names=fingerprint(names), dtype=dtype, shard_bytes=shard_bytes)
    target, export = local_path(folder, FOLDER), Export(tuple(names), dtype, shard_bytes)
    writer = SafetensorsWriter(target, export, save_id=uuid.uuid4().hex, files=files or LocalFiles())
    planner = _TensorPlanner(ShardedSavePlanner(state))

    def finish() -> None:
        everyone(ranks, error_of(lambda: writer.check_tied(planner.flat)), what)
        agreed(ranks, writer.commit, what)

    carry_out_save(ranks, planner, writer, what, then=finish)


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
            SavePlan([], RankPlan(described, list(own)), one.planner_data) for one, own in zip(plans, keys, strict=True)
        ], metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The tensors of the plan, each with its box."""
        plan = self._planner.finish_plan(new_plan)
        tensors = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        return SavePlan([self._with_box(item) for item in tensors], plan.storage_data, plan.planner_data)

    def _with_box(self, item: WriteItem) -> WriteItem:
        assert item.index.index is not None
        box = self._planner.part_of(item.index.index)
        chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        return replace(item, tensor_data=TensorWriteData(chunk, TensorProperties(), chunk.sizes))

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._planner.resolve_data(write_item)


def _described(held: HeldTensors) -> dict[str, Described]:
    """Every tensor that ranks hold, by name."""
    described: dict[str, Described] = {}
    for key, dtype, ndim, shape in zip(held.key.tolist(), held.dtype.tolist(), held.ndim.tolist(), held.shape.tolist()):
        own = Described(tuple(shape[:ndim]), dtype_from_name(held.dtype_names[dtype]))
        described.setdefault(held.keys[key], own)
    return described
