"""What a rank does in a save: describe what it holds, take a part of the plan, and write it.

Each rank lists its boxes. The coordinator checks that they tile every tensor, and assigns each part to a rank. Each
rank resolves its parts to views of its memory, and writes and syncs a file of its own in the folder of the save. The
coordinator adds `.metadata`, for stock readers, and the manifest, and then commits. Before the commit the checkpoint
does not exist; after it, the checkpoint is complete.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opt_checkpoint.boxes import Array, Box, FlatBox, boxes_of
from opt_checkpoint.dcp.coverage import common_differences
from opt_checkpoint.dcp.layout import LocalContents, local_contents
from opt_checkpoint.dcp.plan import AssignedParts, CachedPlan, GlobalPlan, Offer, PlanCache
from opt_checkpoint.disk.archives import dump_object
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
from opt_checkpoint.errors import CheckpointingException, CheckpointValueError
from opt_checkpoint.state.sharded import ShardedStateDict, ShardedTensor
from opt_checkpoint.state.tree import ABSENT, Path, flatten_state, lookup, path_text, scopes, selected
from opt_checkpoint.store import MANIFEST, Location, Target, target_at

logger = logging.getLogger(__name__)


def view_of(shard: ShardedTensor, flat_box: FlatBox, part: Box) -> Tensor:
    """Return the values of `part`, a box within a box of the shard, as a view of the shard's data.

    Args:
        shard: the shard, with data.
        flat_box: one of `boxes_of(shard)`.
        part: a box inside `flat_box.box`, in global coordinates.
    """
    if shard.data is None:
        raise CheckpointValueError(f"{shard.key} has no data")
    values = shard.data.detach()
    if shard.flattened_range is not None:
        if not values.is_contiguous():
            raise CheckpointValueError(f"{shard.key} holds a flat range in memory that is not contiguous")
        values = values[flat_box.start : flat_box.stop].view(flat_box.box.sizes)
    elif shard.prepend_axis_num:
        values = values[(None,) * shard.prepend_axis_num]
    return values if part == flat_box.box else flat_box.box.part_of(values, part)


class ShardedSavePlanner:
    """Plans the save of one nested state of sharded types. Plans are columns of integers.

    Args:
        state: nested dicts of sharded types and plain values.
        common: what to do when plain values, which rank 0 writes, differ on another rank: `"equal"` refuses to save,
            `"first_rank"` takes rank 0's.
        cache: the plan of an earlier save.

    `describe` sets `flat` and `rank`, and `take` sets `assigned`, which this rank writes. On the coordinator, `assign`
    sets `plan`, `objects_of_ranks` (unique keys of the objects that each rank writes) and `stock_only` (keys of the
    plain values that rank 0 also writes on their own, for stock readers).
    """

    def __init__(self, state: ShardedStateDict, *, common: str = "equal", cache: PlanCache | None = None) -> None:
        self._state = state
        self._policy = common
        self._cache = cache
        self._stock: dict[str, Any] = {}

    def describe(self, rank: int, arguments: dict[str, str]) -> Offer:
        """Flatten the state, and describe what ranks must agree on before they plan.

        Args:
            rank: this process's number among those that save.
            arguments: of the save; they must be the same on all ranks.

        Raises:
            CheckpointingException: the state cannot be flattened or stored.
        """
        if self._policy not in ("equal", "first_rank"):
            raise CheckpointValueError(f"common={self._policy!r}; allowed: equal, first_rank")
        self.flat = flatten_state(self._state)
        self.flat.separate_tensors_()
        self._held = [(shard, tuple(boxes_of(shard))) for shard in self.flat.tensors.values()]
        self._contents = local_contents(self.flat, self._held)
        assert self._contents.layout is not None
        common = "".join(sorted(map(repr, self._contents.common.items()))).encode("utf-8", "surrogatepass")
        self.rank = rank
        cached = CachedPlan() if self._cache is None else self._cache.plan
        # If two ranks with equal layouts swap their numbers, different plans have the same name.
        self._cached = cached if cached.rank == rank else CachedPlan()
        layout = self._contents.layout.fingerprint
        return Offer(arguments, layout, hashlib.sha256(common).digest(), self._cached.name)

    def accept(self, offers: Sequence[Offer]) -> None:
        """Decide from the offers of all ranks, which each of them has, whether to reuse a cached plan."""
        about = [self._policy.encode(), b"\0", *(offer.layout for offer in offers)]
        self.plan_name = hashlib.sha256(b"".join(about)).digest()
        self.is_cached = all(offer.cached == self.plan_name for offer in offers)
        self._has_equal_common = len({offer.common for offer in offers}) == 1

    def contents(self) -> LocalContents:
        """Describe what this rank could write; with a cached plan, only what depends on values."""
        contents = self._contents._replace(layout=None) if self.is_cached else self._contents
        return contents._replace(common={}) if self._has_equal_common else contents

    def assign(self, contents: Sequence[LocalContents]) -> list[AssignedParts | None]:
        """Validate what all ranks hold and assign it to ranks; or reuse the plan that all ranks have cached.

        Returns:
            What each rank writes; None for what it has cached.

        Raises:
            CheckpointingException: the states of the ranks do not fit together.
        """
        digests = np.concatenate([of_rank.digests for of_rank in contents])
        cached = self._cached.plan if self.is_cached else None
        layouts = cached.layouts if cached else [of_rank.layout for of_rank in contents if of_rank.layout is not None]
        common = [] if self._has_equal_common else [of_rank.common for of_rank in contents]
        if differing := common and common_differences(common, [layout.plain for layout in layouts]):
            text = f"common values differ between ranks: {', '.join(differing[:8])}"
            if any(".names (" in value or ".state_names." in value for value in differing):
                text += "; if ranks have parts of one model, pass sharded_optimizer(model, optimizer, groups=...)"
            if self._policy == "equal":
                raise CheckpointValueError(
                    f"{text}; make values ShardedObjects and tensors ShardedTensors (sharded_like(key, tensor) where "
                    f"only some ranks have it), or pass common='first_rank' to store the first rank's"
                )
            logger.warning("%s; rank 0's are stored", text)
        if cached is not None and not cached.fits(digests):  # a new plan says which values differ
            cached = None
        self.plan = cached or GlobalPlan.of(layouts, digests, only_first=self._policy == "first_rank")
        # The plain values that stock `load` looks for, by its keys: paths that continue into lists. Those in scoped
        # parts describe optimizers in the form of this package.
        parts = tuple(path for path, _ in scopes(self.flat.state) if path)
        paths = [path for path in self.flat.common if not any(path[: len(part)] == part for part in parts)]
        self._stock = dict(leaf for path in paths for leaf in _stock_leaves(path, lookup(self.flat.state, path)))
        self.stock_only = self._stock.keys() - set(self.plan.tensors.keys)
        first, *others = (parts.objects for parts in self.plan.assigned)
        self.objects_of_ranks = [[*first, COMMON_KEY, *(k for k in self._stock if k in self.stock_only)], *others]
        return [None] * len(contents) if cached else [*self.plan.assigned]

    def take(self, assigned: AssignedParts | None) -> None:
        """Take what this rank writes from the coordinator, or from the cached plan for None; cache it."""
        found = assigned or self._cached.assigned
        assert found is not None  # a rank without a cached plan does not agree to use one
        self.assigned = found
        if self._cache is not None:
            self._cache.plan = CachedPlan(self.plan_name, self.rank, found, self.plan if self.rank == 0 else None)

    def objects(self) -> Iterator[tuple[str, bytes]]:
        """The keys and bytes of the objects that this rank writes.

        Raises:
            CheckpointingException: an object cannot be stored.
        """
        objects = {item.unique_key: item.data for item in self.flat.objects.values()}
        for key in self.objects_of_ranks[0] if self.rank == 0 else self.assigned.objects:
            if key == COMMON_KEY:
                common = selected(self.flat.state, {**self.flat.empty, **self.flat.common})
                try:
                    yield key, dump_object({} if common is ABSENT else common, COMMON_KEY)
                except CheckpointingException:
                    for name, inner in (leaf for item in self.flat.common.items() for leaf in _stock_leaves(*item)):
                        dump_object(inner, name)  # raises with the name of the value
                    raise
            elif key in objects:
                yield key, dump_object(objects[key], key)
            else:  # as `torch.distributed.checkpoint` stores it; encoding the common state has checked that it loads
                stream = io.BytesIO()
                torch.save(self._stock[key], stream)
                yield key, stream.getvalue()

    def parts(self) -> Iterator[tuple[str, Box, Tensor]]:
        """The key, box and values of each part of a tensor that this rank writes; values are views of its memory.

        Raises:
            CheckpointingException: the plan does not fit what this rank holds.
        """
        boxes = [(shard, box) for shard, of_shard in self._held for box in of_shard]
        columns = (self.assigned.box.tolist(), self.assigned.offsets.tolist(), self.assigned.sizes.tolist())
        for number, offsets, sizes in zip(*columns, strict=True):
            shard, flat_box = boxes[number]
            axes = len(flat_box.box.sizes)
            part = Box(tuple(offsets[:axes]), tuple(sizes[:axes]))
            if part != flat_box.box and flat_box.box.overlap(part) != part:
                raise CheckpointValueError(f"{shard.key}: the plan wants {part} of the box {flat_box.box}")
            yield shard.key, part, view_of(shard, flat_box, part)


def _stock_leaves(path: Path, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) or (isinstance(value, list) and _is_traversed(value)):
        items: Mapping[Any, Any] = value if isinstance(value, dict) else dict(enumerate(value))
        for key, inner in items.items():
            yield from _stock_leaves((*path, key), inner)
    elif not isinstance(value, Tensor):
        yield path_text(path), value


def _is_traversed(values: list[Any]) -> bool:
    """Whether stock DCP gives each element of a list a key; other lists, and all tuples, are objects."""
    return any(isinstance(v, Tensor | dict) or (isinstance(v, list) and _is_traversed(v)) for v in values)


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
        save_id: 32 hexadecimal digits, the same on all ranks or only the coordinator's; names this save.
        details: recorded in the manifest for people: versions, sizes of the worlds.
        target: the store and name of `path`, if it is not the usual one.
        replace: whether the commit replaces a checkpoint that is at `path`.
    """

    path: Location
    save_id: str
    details: Mapping[str, Any]
    target: Target | None
    replace: bool

    def __post_init__(self) -> None:
        self._store, self._target = self.target or target_at(self.path)

    def begin(self, planner: ShardedSavePlanner) -> list[str]:
        """Create the temporary location, on the coordinator; the save id for each rank. Raises like `Store.begin`."""
        self._store.begin(self._target, self.save_id, replace=self.replace)
        return [self.save_id] * planner.plan.tensors.ranks

    def write(self, save_id: str, planner: ShardedSavePlanner) -> WrittenFile:
        """Write this rank's file and sync it.

        Raises:
            OSError: the file system reports an error.
        """
        name = f"__{planner.rank}_0.distcp"
        tensors = lambda: ((key, values) for key, _, values in planner.parts())
        output = DataFileWriter(file_header(save_id), planner.objects, tensors)
        self._store.write(f"{self._store.folder(self._target, save_id)}/{name}", output)
        placed = [item for item in output.placed if item.values_start >= 0]
        return WrittenFile(
            name=name,
            stored=output.written(),
            parts_crc=planner.assigned.crc,
            places=np.array([(o.values_start, o.start, o.end - o.start) for o in placed], "<i8").reshape(-1, 3),
            sums=np.array([crc for item in placed for crc in item.sums], "<u4"),
            objects={
                o.key: ByteRange(file=name, start=o.start, nbytes=o.end - o.start, sums=tuple(o.sums), archive=True)
                for o in output.placed
                if o.values_start < 0
            },
        )

    def finish(self, planner: ShardedSavePlanner, written: list[WrittenFile]) -> None:
        """On the coordinator, write the manifest and commit.

        Raises:
            CheckpointingException: a planned item was not written; see also `Store.commit`.
            OSError: the file system reports an error.
        """
        # Imports torch.distributed.checkpoint, which takes half a second.
        from opt_checkpoint.disk.dcp_metadata_writer import encode_dcp_metadata

        tensors, archives = _stored(planner, written)
        objects = {key: place for file in written for key, place in file.objects.items()}
        paths = {key: path for layout in planner.plan.layouts for key, path in layout.plain.items()}
        index = CheckpointIndex(
            path=self.path,
            kind=Kind.OURS,
            tensors=tensors,
            objects={key: place for key, place in objects.items() if key not in planner.stock_only},
            files={file.name: file.stored for file in written},
            save_id=self.save_id,
            details={"torch": torch.__version__, PATHS: paths, **self.details},
        )
        contents = {
            METADATA: encode_dcp_metadata(tensors, objects, list(index.files), archives, paths),
            MEGATRON_MARK: MEGATRON_MARKED,
        }
        index.files.update((name, StoredFile(size=len(raw), crc=crc32(raw))) for name, raw in contents.items())
        contents[MANIFEST] = encode_manifest(index)
        self._store.write_small(self._store.folder(self._target, self.save_id), contents)
        sizes = {name: file.size for name, file in index.files.items()} | {MANIFEST: len(contents[MANIFEST])}
        self._store.commit(self._target, self.save_id, sizes, replace=self.replace)

    def abandon(self) -> None:
        """Remove the files of a failed save; on the coordinator, once all ranks have finished."""
        self._store.abandon(self._target, self.save_id)


def _stored(planner: ShardedSavePlanner, written: Sequence[WrittenFile]) -> tuple[StoredTensors, Array]:
    """The stored tensors, sorted by key, after every rank has written its file; (chunks, 2) start and size of the
    archive of each chunk, in the order of their columns.

    Raises:
        CheckpointingException: a rank has not written exactly what was planned.
    """
    tensors = planner.plan.tensors
    parts = planner.plan.parts
    assigned = planner.plan.assigned
    nbytes = np.prod(parts.sizes, axis=1) * tensors.itemsize[tensors.owner[parts.box]]
    count = np.maximum(1, -(-nbytes // PIECE_BYTES))  # of the checksums of each part
    counts = np.bincount(parts.rank, weights=count, minlength=len(written)).tolist()
    for rank, (file, given, objects) in enumerate(zip(written, assigned, planner.objects_of_ranks, strict=True)):
        has_parts = file.parts_crc == given.crc and (len(file.places), len(file.sums)) == (len(given.box), counts[rank])
        if not has_parts or file.objects.keys() != set(objects):
            raise CheckpointValueError(
                f"rank {rank} has not written the {len(given.box)} parts and {len(objects)} objects that were planned"
            )
    keys = np.array(sorted(range(len(tensors.keys)), key=tensors.keys.__getitem__), np.int64)
    first = tensors.first_of_key[keys]
    tensor = np.argsort(keys)[tensors.key[tensors.owner[parts.box]]]
    order = np.argsort(tensor, kind="stable")
    raw = [tensors.keys[number].encode("utf-8", "surrogatepass") for number in keys.tolist()]
    dtypes = sorted(tensors.dtype_names)
    renumbered = np.array([dtypes.index(name) for name in tensors.dtype_names] or [0])
    places = np.concatenate([file.places for file in written])[order]
    sums = np.concatenate([file.sums for file in written])
    shift = np.repeat((np.cumsum(count) - count)[order] - (np.cumsum(count[order]) - count[order]), count[order])
    columns = {
        "keys": np.frombuffer(b"".join(raw), "|u1"),
        "key_bytes": np.fromiter(map(len, raw), "<u4", len(raw)),
        "dtype": renumbered[tensors.dtype[first]].astype("|u1"),
        "ndim": tensors.ndim[first].astype("|u1"),
        "shape": tensors.shape[first].astype("<i8"),
        "chunks": np.bincount(tensor, minlength=len(keys)).astype("<i8"),
        "offsets": parts.offsets[order].astype("<i8"),
        "sizes": parts.sizes[order].astype("<i8"),
        "file": parts.rank[order].astype("<u4"),
        "start": np.ascontiguousarray(places[:, 0]),
        "sums": sums[np.arange(len(sums)) + shift],
    }
    return StoredTensors(columns, tuple(dtypes), {file.name: file.stored for file in written}), places[:, 1:]
