"""Saves the part of a state that one rank holds as a separate checkpoint, without communication.

Every box that the rank holds is stored as a tensor, replicas too, so that the same rank of the same layout finds all it
needs. The files are those of any checkpoint: `optckpt verify` and `optckpt show` read them. The manifest's details
record the global tensor and box of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_type_hints

from opt_checkpoint.boxes import boxes_of, view_of
from opt_checkpoint.dcp.layout import check_object_names
from opt_checkpoint.dcp.load_planner import ShardedLoadPlanner
from opt_checkpoint.dcp.reader import CheckpointReader
from opt_checkpoint.disk.checkpoint import Opened, read_common
from opt_checkpoint.disk.index import COMMON_KEY, PATHS, CheckpointIndex, StoredChunk, StoredTensor
from opt_checkpoint.disk.manifest import read_manifest
from opt_checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointingException,
    CheckpointMismatchError,
    CheckpointValueError,
)
from opt_checkpoint.run.ranks import Ranks, from_all, on_all, own_and_all
from opt_checkpoint.run.save_load import LoadReport, read_planned, save_as
from opt_checkpoint.state.checksums import are_equal
from opt_checkpoint.state.sharded import ShardedObject, ShardedStateDict, ShardedTensor
from opt_checkpoint.state.tensors import DTYPE_NAMES, dtype_from_name, sharded_like
from opt_checkpoint.state.tree import flatten_state
from opt_checkpoint.store import Location, Target

_DETAILS = "rank_part"
# Stored next to the plain values of the state.
_BOXES = "opt-checkpoint boxes"
_OBJECTS = "opt-checkpoint objects"


class PartName(NamedTuple):
    """Identifies a part.

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
    flat = flatten_state(state, saves=True)
    check_object_names(flat)
    stored: dict[str, ShardedTensor] = {}
    boxes: dict[str, Any] = {}
    for shard in flat.tensors.values():
        for held in boxes_of(shard):
            view = view_of(shard, held, held.box)
            offsets = list(held.box.offsets)
            box = f"{shard.key}@{'.'.join(map(str, offsets))}"
            first = stored.setdefault(box, sharded_like(box, view)).data
            if first is not None and not are_equal(first, view):
                raise CheckpointValueError(f"two different tensors would be {shard.key}; give one of them another key")
            boxes[box] = [shard.key, offsets]
    tensors = {shard.key: [DTYPE_NAMES[shard.dtype], list(shard.global_shape)] for shard in flat.tensors.values()}
    paths = {flat.tensors[path].key: list(path) for path in flat.plain}
    described = {"name": name._asdict(), "boxes": boxes, "tensors": tensors, PATHS: paths}
    objects = {o.unique_key: ShardedObject(o.unique_key, o.data, (1,), (0,)) for o in flat.objects.values()}
    common = flat.nested_common()
    if not isinstance(common, dict):
        raise CheckpointValueError(
            f"the state is a {type(state).__name__} with plain values; the local tier saves dicts: pass "
            f"{{'name': state}}"
        )
    part = {**common, _BOXES: stored, _OBJECTS: objects}
    path = target.store.path(target.name)
    save_as(part, path, process_group=Ranks(), details={_DETAILS: described}, target=target)


def read_part_name(index: CheckpointIndex) -> PartName:
    """Read the name of a part.

    Raises:
        CheckpointCorruptError: it is not a part.
    """
    try:
        recorded = index.details[_DETAILS]["name"]
        return PartName(*(kind(recorded[name]) for name, kind in get_type_hints(PartName).items()))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{index.path} is not one rank's part of a checkpoint") from error


def open_part(path: Location) -> Opened:
    """Open a part, described as global tensors of which it holds some boxes.

    Raises:
        CheckpointCorruptError: it is damaged, or not a part.
        OSError: it cannot be read.
    """
    index = read_manifest(path)
    common = {key: value for key, value in read_common(index).items() if key not in (_BOXES, _OBJECTS)}
    try:
        described = index.details[_DETAILS]
        chunks: dict[str, list[StoredChunk]] = {key: [] for key in described["tensors"]}
        for name, (key, offsets) in described["boxes"].items():
            for chunk in index.tensors[name].chunks:
                chunks[key].append(replace(chunk, box=chunk.box.moved(tuple(offsets))))
        # Tensors in lists of plain values were stored as those of any checkpoint are.
        tensors = {key: index.tensors[key] for key in index.tensors if key not in described["boxes"]}
        for key, (dtype, shape) in described["tensors"].items():
            tensors[key] = StoredTensor(shape=tuple(shape), dtype=dtype_from_name(dtype), chunks=tuple(chunks[key]))
        paths = {**index.details[PATHS], **described.get(PATHS, {})}  # older parts lack them
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{path} is not one rank's part of a checkpoint: {error!r}") from error
    # In a part, an object is stored as a grid of one under its unique key.
    objects = {key if key == COMMON_KEY else key.removesuffix("/shard_0_1"): p for key, p in index.objects.items()}
    return Opened(index=replace(index, tensors=tensors, objects=objects, details={PATHS: paths}), common=common)


def plan_part(ranks: Ranks, planner: ShardedLoadPlanner) -> bytes:
    """Plan to read from this rank's part, and return the keys that it requests; all ranks call this together.

    Raises:
        CheckpointMismatchError: the parts were saved in another layout: values that a rank requests are not in its own
            part. Raised on every rank.
        CheckpointingException: as `load`.
    """
    index = planner.index
    what = f"loading {index.path}"

    def plan() -> tuple[bytes, list[Exception]]:
        try:
            return planner.plan(), []
        except CheckpointingException as error:
            return b"", [error]

    def find() -> list[str | None]:
        """For each rank, a key that it misses and that is in this rank's part."""
        own = {*index.tensors, *index.objects, *planner.stored_plain}
        return [next((key for key in keys if planner.stored_name(key) in own), None) for keys in missing]

    (asked, errors), missing = own_and_all(ranks, plan, lambda _: planner.missing, what)
    per_holder = from_all(ranks, find, what) if any(missing) else []
    found = [(rank, holder, key) for holder, keys in enumerate(per_holder) for rank, key in enumerate(keys) if key]
    if found:
        rank, holder, key = min(found)
        raise CheckpointMismatchError(
            f"the local tier was saved in another layout: rank {rank} asks for {key}, which is in the part of "
            f"rank {holder}"
        )
    from_all(ranks, lambda: raise_first(errors), what)
    return asked


def raise_first(errors: Sequence[BaseException]) -> None:
    """Raise the first error, if there is one."""
    if errors:
        raise errors[0]


def load_part(ranks: Ranks, planner: ShardedLoadPlanner) -> LoadReport:
    """Load from this rank's part. All ranks call this together, and write memory only after all have planned.

    Raises:
        CheckpointMismatchError: as `plan_part`.
        CheckpointingException: as `load`.
    """
    asked = plan_part(ranks, planner)
    reader = CheckpointReader(planner)

    def check() -> tuple[str, ...]:
        unexpected = planner.unexpected_of([asked])
        reader.verify()
        return unexpected

    unexpected = on_all(ranks, check, f"loading {planner.index.path}")
    return read_planned(ranks, reader, unexpected)
