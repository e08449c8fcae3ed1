"""What is written and what is read, as planners of torch.distributed.checkpoint.

Saving: each rank lists its boxes, the coordinator checks that they tile every tensor and deals them out, each rank
resolves its parts to views. Loading: each rank turns the boxes it wants into parts of stored chunks, and proves that
they are whole, before any memory is touched.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from opt_checkpoint.boxes.box import Box, FlatBox, boxes_of
from opt_checkpoint.dcp.balance import Part, assign_parts
from opt_checkpoint.dcp.local_contents import LocalContents, local_contents, with_one_main_each, with_plain_on_one
from opt_checkpoint.dcp.validation import common_differences, validate_sharding_integrity
from opt_checkpoint.disk.dtype_names import dtype_from_name
from opt_checkpoint.disk.index import COMMON_KEY
from opt_checkpoint.disk.torch_zip_reader import dump_object
from opt_checkpoint.errors import CheckpointingException
from opt_checkpoint.state.flat_state import FlatState, flatten_state
from opt_checkpoint.state.sharded import Shape, ShardedStateDict, ShardedTensor
from opt_checkpoint.state.tree import Path, nest, path_text, scopes

logger = logging.getLogger(__name__)


class Common(Enum):
    """What to do where the common values of a state, which rank 0 writes, differ on another rank."""

    EQUAL = "equal"  # refuse to save, naming the values
    FIRST_RANK = "first_rank"  # take rank 0's, and log what differs


class _HeldBox(NamedTuple):
    """A held box and the shard whose data it is part of."""

    shard: ShardedTensor
    held: FlatBox


def view_of(shard: ShardedTensor, held: FlatBox, part: Box) -> Tensor:
    """The values of `part`, a box within a held box, as a view of the shard's data.

    Args:
        shard: the shard, with data.
        held: one of `boxes_of(shard)`.
        part: a box inside `held.box`, in global coordinates.
    """
    data = _data(shard)
    if shard.flattened_range is None:
        whole = data.detach()[(None,) * shard.prepend_axis_num]
    else:
        whole = data.detach()[held.start : held.stop].view(held.box.sizes)
    for axis, (low, base, size) in enumerate(zip(part.offsets, held.box.offsets, part.sizes)):
        whole = whole.narrow(axis, low - base, size)
    return whole


def _data(shard: ShardedTensor) -> Tensor:
    if shard.data is None:
        raise CheckpointingException(f"{shard.key} has no data")
    if shard.flattened_range is not None and not shard.data.is_contiguous():
        raise CheckpointingException(f"{shard.key} holds a flat range in memory that is not contiguous")
    return shard.data


class ShardedSavePlanner(SavePlanner):
    """Plans the save of one nested state of sharded types.

    The state comes through the constructor, and the `state_dict` that `dcp.save` passes on is not looked at: flattening
    belongs to the first planning step, whose errors reach every rank.

    Args:
        state: nested dicts of sharded types and plain values.
        common: what to do where ranks disagree on a plain value.
    """

    def __init__(self, state: ShardedStateDict, *, common: Common = Common.EQUAL) -> None:
        self._state = state
        self._policy = common
        self._flat: FlatState | None = None
        self._sources: dict[str, list[_HeldBox]] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state apart; raises CheckpointingException where that fails."""
        self._flat = flatten_state(self._state)
        self._stock_values = stock_values(self._flat)
        for shard in self._flat.tensors.values():
            sources = self._sources.setdefault(shard.key, [])
            sources.extend(_HeldBox(shard, held) for held in boxes_of(shard))

    @property
    def flat(self) -> FlatState:
        """The state taken apart."""
        if self._flat is None:
            raise RuntimeError("set_up_planner has not been called")
        return self._flat

    def create_local_plan(self) -> SavePlan:
        """What this rank could write, as `planner_data`; what it does write is decided by the coordinator."""
        return SavePlan([], planner_data=local_contents(self.flat))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Validate what all ranks hold and deal them out.

        Raises:
            CheckpointingException: they do not fit together.
        """
        contents: list[LocalContents] = [plan.planner_data for plan in all_plans]
        self._judge_common(contents)
        contents = with_plain_on_one(contents, only_first=self._policy is Common.FIRST_RANK)
        per_rank = with_one_main_each(contents)
        validate_sharding_integrity(per_rank)
        parts = assign_parts(per_rank)
        described = {o.key: (o.dtype, o.shape) for own in per_rank for o in own.tensors}
        objects = _object_writers(per_rank)
        plans = [
            SavePlan([*(_tensor_item(p, *described[p.key]) for p in own), *map(_object_item, objects[rank])])
            for rank, own in enumerate(parts)
        ]
        values = [key for key in self._stock_values if key not in described]
        plans[0] = SavePlan([*plans[0].items, *map(_object_item, values)])
        paths = {key: path for own in per_rank for key, path in own.plain.items()}
        return plans, _metadata(described, parts, objects, paths)

    def _judge_common(self, per_rank: list[LocalContents]) -> None:
        differing = common_differences(per_rank)
        if not differing:
            return
        text = f"common values differ between ranks: {', '.join(differing[:8])}"
        if self._policy is Common.EQUAL:
            raise CheckpointingException(
                f"{text}; make values ShardedObjects and tensors ShardedTensors, or pass common='first_rank' to store "
                f"the first rank's"
            )
        logger.warning("%s; rank 0's are stored", text)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it came; nothing is left to decide."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """A view of this rank's memory for a tensor; the bytes of an object."""
        key = write_item.index.fqn
        if write_item.type is WriteItemType.BYTE_IO:
            if key in self._stock_values:
                return _bare_archive(self._stock_values[key])
            return io.BytesIO(dump_object(self._object(key), key))
        chunk = _chunk(write_item)
        part = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        source = next(s for s in self._sources[key] if s.held.box.overlap(part) == part)
        return view_of(source.shard, source.held, part)

    def _object(self, key: str) -> Any:
        if key == COMMON_KEY:
            return nest({**self.flat.empty, **self.flat.common})
        return next(o.data for o in self.flat.objects.values() if o.unique_key == key)


def _bare_archive(value: Any) -> io.BytesIO:
    """A value as `torch.distributed.checkpoint` stores it; the common state proves that it loads."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


def stock_values(flat: FlatState) -> dict[str, Any]:
    """The plain values that `torch.distributed.checkpoint.load` looks for, by its keys: paths that enter lists.

    Those in scoped parts are left out: they describe optimizers in our own form.
    """
    parts = tuple(path for path, _ in scopes(flat.state) if path)
    values: dict[str, Any] = {}
    for path, value in flat.common.items():
        if not any(path[: len(part)] == part for part in parts):
            values.update(_stock_leaves(path, value))
    return values


def _stock_leaves(path: Path, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _stock_leaves((*path, key), inner)
    elif not isinstance(value, Tensor):
        yield path_text(path), value


def _chunk(write_item: WriteItem) -> ChunkStorageMetadata:
    if write_item.tensor_data is None:
        raise RuntimeError(f"{write_item.index} is no tensor")
    return write_item.tensor_data.chunk


def _object_writers(per_rank: list[LocalContents]) -> list[list[str]]:
    """Unique keys of the objects that each rank writes: their main replicas; rank 0 the common state too."""
    keys = [[o.unique_key for o in own.objects if o.main] for own in per_rank]
    keys[0].append(COMMON_KEY)
    return keys


def _tensor_item(part: Part, dtype: str, shape: Shape) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(part.key, part.box.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(part.box.offsets), torch.Size(part.box.sizes)),
            properties=TensorProperties(dtype_from_name(dtype)),
            size=torch.Size(shape),
        ),
    )


def _object_item(unique_key: str) -> WriteItem:
    return WriteItem(index=MetadataIndex(unique_key), type=WriteItemType.BYTE_IO)


def _metadata(
    described: dict[str, tuple[str, Shape]],
    parts: list[list[Part]],
    objects: list[list[str]],
    paths: dict[str, Path],
) -> Metadata:
    """What is stored; `planner_data` has the paths of plain tensors, as stock planners record them."""
    state: dict[str, Any] = {
        key: TensorStorageMetadata(TensorProperties(dtype_from_name(dtype)), torch.Size(shape), [])
        for key, (dtype, shape) in described.items()
    }
    for own in parts:
        for part in own:
            chunk = ChunkStorageMetadata(torch.Size(part.box.offsets), torch.Size(part.box.sizes))
            state[part.key].chunks.append(chunk)
    state.update((key, BytesStorageMetadata()) for own in objects for key in own)
    return Metadata(state, paths)
