"""Saves the part of a state that one rank holds as a separate checkpoint, without communication.

Every box that the rank holds is stored, replicas too, so that the same rank of the same layout finds all it needs. The
files are those of any checkpoint: `optckpt verify` and `optckpt show` read them. The manifest's details record the
global tensor and box of each stored tensor.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from opt_checkpoint.boxes.box import boxes_of
from opt_checkpoint.dcp.load_planner import ShardedLoadPlanner
from opt_checkpoint.dcp.reader import CheckpointReader
from opt_checkpoint.dcp.save_planner import ShardedSavePlanner, view_of
from opt_checkpoint.dcp.stored_names import NESTED_KEYS
from opt_checkpoint.dcp.writer import CheckpointWriter
from opt_checkpoint.disk.detect import Opened, read_common
from opt_checkpoint.disk.dtype_names import dtype_from_name, dtype_name
from opt_checkpoint.disk.index import COMMON_KEY, CheckpointIndex, StoredChunk, StoredTensor
from opt_checkpoint.disk.manifest import read_manifest
from opt_checkpoint.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointValueError
from opt_checkpoint.run.ranks import Ranks, everyone
from opt_checkpoint.run.save_load import LoadReport, error_of, read_planned
from opt_checkpoint.state.dtensor import whole_tensor
from opt_checkpoint.state.flat_state import FlatState, flatten_state
from opt_checkpoint.state.sharded import ShardedObject, ShardedStateDict, ShardedTensor
from opt_checkpoint.state.tree import nest
from opt_checkpoint.store import Location, Target

_DETAILS = "rank_part"
_BOXES, _OBJECTS = "opt-checkpoint boxes", "opt-checkpoint objects"  # next to the plain values of the state


class PartName(NamedTuple):
    """Identifies a part: its run, step, save and rank.

    Args:
        run: the run.
        step: the step.
        save: identifies this save of the step; the same on all ranks.
        rank: the rank that saved the part.
        world: number of ranks that saved.
    """

    run: str
    step: int
    save: str
    rank: int
    world: int


def save_part(state: ShardedStateDict, target: Target, name: PartName) -> None:
    """Save the part of a state that this rank holds.

    Raises:
        CheckpointingException: the state cannot be stored.
        OSError: raised by the file system.
    """
    flat = flatten_state(state)
    boxes, described = _boxes(flat)
    details = {
        _DETAILS: {"name": name._asdict(), **described},
        "paths": {flat.tensors[plain].key: list(plain) for plain in flat.plain},
    }
    objects = {key: ShardedObject(key, item.data, (1,), (0,)) for key, item in _objects(flat).items()}
    common = nest({**flat.empty, **flat.common})
    planner = ShardedSavePlanner({**common, _BOXES: boxes, _OBJECTS: objects})
    writer = CheckpointWriter(
        target.store.path(target.name), save_id=uuid.uuid4().hex, details=MappingProxyType(details), target=target
    )
    try:
        (assigned,), planned = planner.create_global_plan([planner.create_local_plan()])
        (message,) = writer.begin(planned)
        planner.finish_plan(assigned)
        writer.finish([writer.write_data(message, planner)])
    except BaseException:
        writer.abandon()
        raise


def _boxes(flat: FlatState) -> tuple[dict[str, ShardedTensor], dict[str, Any]]:
    """A stored tensor for every box, and a description of its position in the global tensor."""
    boxes: dict[str, ShardedTensor] = {}
    offsets: dict[str, list[Any]] = {}
    for shard in flat.tensors.values():
        for held in boxes_of(shard):
            view = view_of(shard, held, held.box)
            name = f"{shard.key}@{'.'.join(map(str, held.box.offsets))}"
            first = boxes.setdefault(name, whole_tensor(name, view)).data
            if first is not None and (first.shape != view.shape or not torch.equal(_bits(first), _bits(view))):
                raise CheckpointValueError(
                    f"two different tensors would be stored as {shard.key}; give one of them another key"
                )
            offsets[name] = [shard.key, list(held.box.offsets)]
    shapes = {s.key: [dtype_name(s.dtype), list(s.global_shape)] for s in flat.tensors.values()}
    return boxes, {"boxes": offsets, "tensors": shapes}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _objects(flat: FlatState) -> Mapping[str, ShardedObject]:
    return {item.unique_key: item for item in flat.objects.values()}


def read_part_name(index: CheckpointIndex) -> PartName:
    """Read the name of a part.

    Raises:
        CheckpointCorruptError: it is not a part.
    """
    try:
        name = index.details[_DETAILS]["name"]
        return PartName(str(name["run"]), int(name["step"]), str(name["save"]), int(name["rank"]), int(name["world"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{index.path} is not one rank's part of a checkpoint") from error


def open_part(path: Location) -> Opened:
    """Open a part, described as global tensors of which it holds some boxes.

    Raises:
        CheckpointCorruptError: it is damaged, or not a part.
        OSError: it cannot be read.
    """
    index = read_manifest(path)
    common = dict(read_common(index))
    common.pop(_BOXES, None)
    common.pop(_OBJECTS, None)
    try:
        described = index.details[_DETAILS]
        chunks: dict[str, list[StoredChunk]] = {key: [] for key in described["tensors"]}
        for name, (key, offsets) in described["boxes"].items():
            for chunk in index.tensors[name].chunks:
                chunks[key].append(replace(chunk, box=chunk.box.moved(tuple(offsets))))
        tensors = {
            key: StoredTensor(shape=tuple(shape), dtype=dtype_from_name(dtype), chunks=tuple(chunks[key]))
            for key, (dtype, shape) in described["tensors"].items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{path} is not one rank's part of a checkpoint: {error!r}") from error
    objects = {_plain_key(key): place for key, place in index.objects.items()}
    details = {NESTED_KEYS: True, "paths": index.details.get("paths")}
    return Opened(index=replace(index, tensors=tensors, objects=objects, details=details), common=common)


def _plain_key(key: str) -> str:
    """The unique key of an object of the state. In a part, an object is stored as a grid of one under that key."""
    return key if key == COMMON_KEY else key.removesuffix("/shard_0_1")


def _check_layout(ranks: Ranks, planner: ShardedLoadPlanner, index: CheckpointIndex) -> None:
    """Raise if a key that is missing in the part of one rank is stored in the part of another: the layout differs."""
    missing = ranks.gather_everywhere(planner.missing)
    if not any(missing):
        return
    own = {*index.tensors, *index.objects, *planner.stored_plain}
    held = [[planner.stored_name(key) in own for key in keys] for keys in missing]
    for rank, flags in enumerate(zip(*ranks.gather_everywhere(held), strict=True)):
        for holder, has in enumerate(flags):
            if any(has):
                key = missing[rank][has.index(True)]
                raise CheckpointMismatchError(
                    f"the local tier was saved in another layout: rank {rank} asks for {key}, which is in the part of "
                    f"rank {holder}"
                )


def plan_part(ranks: Ranks, planner: ShardedLoadPlanner, index: CheckpointIndex) -> bytes:
    """Plan to read from this rank's part, and return the keys that it requests; all ranks call this together.

    Raises:
        CheckpointMismatchError: the parts were saved in another layout: values that a rank requests are not in its own
            part. Raised on every rank.
        CheckpointingException: as `load`.
    """
    asked: list[bytes] = []
    error = error_of(lambda: asked.append(planner.create_local_plan()))
    _check_layout(ranks, planner, index)
    everyone(ranks, error, f"loading {index.path}")
    return asked[0]


def load_part(ranks: Ranks, planner: ShardedLoadPlanner, reader: CheckpointReader) -> LoadReport:
    """Load from this rank's part. All ranks call this together, and write memory only after all have planned.

    Raises:
        CheckpointMismatchError: as `plan_part`.
        CheckpointingException: as `load`.
    """
    asked = plan_part(ranks, planner, reader.index)
    unexpected: list[tuple[str, ...]] = []
    error = error_of(lambda: unexpected.append(planner.unexpected_of([asked])))
    everyone(ranks, error, f"loading {reader.index.path}")
    return read_planned(ranks, planner, reader, unexpected[0])
