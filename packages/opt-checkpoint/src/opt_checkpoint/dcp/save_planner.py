"""Plans a save.

Each rank lists its boxes. The coordinator checks that they tile every tensor, and assigns each part to a rank. Each
rank resolves its parts to views of its memory.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opt_checkpoint.boxes.box import Box, FlatBox, boxes_of
from opt_checkpoint.dcp.coverage import common_differences
from opt_checkpoint.dcp.local_contents import LocalBoxes, LocalContents, local_contents
from opt_checkpoint.dcp.plan import Agreement, AssignedParts, CachedPlan, GlobalPlan, Offer, PlanCache
from opt_checkpoint.disk.dtype_names import is_storable
from opt_checkpoint.disk.index import COMMON_KEY
from opt_checkpoint.disk.torch_zip_reader import dump_object
from opt_checkpoint.errors import CheckpointingException, CheckpointValueError
from opt_checkpoint.state.flat_state import FlatState, flatten_state, separate_tensors_
from opt_checkpoint.state.sharded import ShardedStateDict, ShardedTensor
from opt_checkpoint.state.tree import ABSENT, Path, lookup, path_text, scopes, selected

logger = logging.getLogger(__name__)


def view_of(shard: ShardedTensor, held: FlatBox, part: Box) -> Tensor:
    """Return the values of `part`, a box within a held box, as a view of the shard's data.

    Args:
        shard: the shard, with data.
        held: one of `boxes_of(shard)`.
        part: a box inside `held.box`, in global coordinates.
    """
    if shard.data is None:
        raise CheckpointValueError(f"{shard.key} has no data")
    values = shard.data.detach()
    if shard.flattened_range is not None:
        if not values.is_contiguous():
            raise CheckpointValueError(f"{shard.key} holds a flat range in memory that is not contiguous")
        values = values[held.start : held.stop].view(held.box.sizes)
    elif shard.prepend_axis_num:
        values = values[(None,) * shard.prepend_axis_num]
    return values if part == held.box else held.box.part_of(values, part)


class ShardedSavePlanner:
    """Plans the save of one nested state of sharded types. Plans are columns of integers.

    Args:
        state: nested dicts of sharded types and plain values.
        common: what to do when plain values, which rank 0 writes, differ on another rank: `"equal"` refuses to save,
            `"first_rank"` takes rank 0's.
        cache: the plan of an earlier save.
    """

    flat: FlatState  # set by `describe`
    rank: int  # the same
    assigned: AssignedParts  # what this rank writes; set by `take`
    plan: GlobalPlan  # on the coordinator, as the next two; set by `assign`
    objects_of_ranks: list[list[str]]  # unique keys of the objects that each rank writes
    stock_only: set[str]  # keys of the plain values that rank 0 also writes on their own, for stock readers

    def __init__(self, state: ShardedStateDict, *, common: str = "equal", cache: PlanCache | None = None) -> None:
        self._state, self._policy, self._cache = state, common, cache
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
        separate_tensors_(self.flat, is_storable)
        self._held = [LocalBoxes(shard, tuple(boxes_of(shard))) for shard in self.flat.tensors.values()]
        self._contents = local_contents(self.flat, self._held)
        assert self._contents.layout is not None
        common = "".join(sorted(map(repr, self._contents.common.items()))).encode("utf-8", "surrogatepass")
        self.rank, self._cached = rank, CachedPlan() if self._cache is None else self._cache.plan_of(rank)
        layout = self._contents.layout.fingerprint
        return Offer(arguments, layout, hashlib.sha256(common).digest(), self._cached.name)

    def accept(self, offers: Sequence[Offer]) -> None:
        """Decide from the offers of all ranks whether to reuse a cached plan."""
        self._agreement = Agreement.of(offers, self._policy)

    def contents(self) -> LocalContents:
        """Describe what this rank could write; with a cached plan, only what depends on values."""
        contents = self._contents
        if self._agreement.is_remembered:
            contents = replace(contents, layout=None)
        return replace(contents, common={}) if self._agreement.equal_common else contents

    def assign(self, contents: Sequence[LocalContents]) -> list[AssignedParts | None]:
        """Validate what all ranks hold and assign it to ranks; or reuse the plan that all ranks have cached.

        Returns:
            What each rank writes; None for what it has cached.

        Raises:
            CheckpointingException: the states of the ranks do not fit together.
        """
        digests = np.concatenate([own.digests for own in contents])
        cached = self._cached.plan if self._agreement.is_remembered else None
        layouts = cached.layouts if cached else [own.layout for own in contents if own.layout is not None]
        if not self._agreement.equal_common:
            self._compare_common(common_differences([own.common for own in contents], [own.plain for own in layouts]))
        if cached is None:
            self.plan = GlobalPlan.of(layouts, digests, only_first=self._policy == "first_rank")
        else:
            self.plan = cached
            cached.check_values(digests)
        self._stock = stock_values(self.flat)
        self.stock_only = self._stock.keys() - set(self.plan.tensors.keys)
        first, *others = self.plan.objects
        self.objects_of_ranks = [[*first, COMMON_KEY, *(k for k in self._stock if k in self.stock_only)], *others]
        return [None] * len(contents) if cached else [*self.plan.assigned()]

    def _compare_common(self, differing: Sequence[str]) -> None:
        if not differing:
            return
        text = f"common values differ between ranks: {', '.join(differing[:8])}"
        if self._policy == "equal":
            raise CheckpointValueError(
                f"{text}; make values ShardedObjects and tensors ShardedTensors (sharded_like(key, tensor) where only "
                f"some ranks have it), or pass common='first_rank' to store the first rank's"
            )
        logger.warning("%s; rank 0's are stored", text)

    def take(self, assigned: AssignedParts | None) -> None:
        """Take what this rank writes from the coordinator, or from the cached plan for None; cache it."""
        found = assigned or self._cached.assigned
        if found is None:
            raise RuntimeError("a rank without a cached plan agreed to use one")
        self.assigned = found
        if self._cache is not None:
            plan = self.plan if self.rank == 0 else None
            self._cache.keep(CachedPlan(self._agreement.plan, self.rank, found, plan))

    def objects(self) -> Iterator[tuple[str, bytes]]:
        """The keys and bytes of the objects that this rank writes.

        Raises:
            CheckpointingException: an object cannot be stored.
        """
        objects = {item.unique_key: item.data for item in self.flat.objects.values()}
        for key in self.objects_of_ranks[0] if self.rank == 0 else self.assigned.objects:
            if key == COMMON_KEY:
                yield key, self._common_archive()
            elif key in objects:
                yield key, dump_object(objects[key], key)
            else:  # as `torch.distributed.checkpoint` stores it; encoding the common state has checked that it loads
                stream = io.BytesIO()
                torch.save(self._stock[key], stream)
                yield key, stream.getvalue()

    def _common_archive(self) -> bytes:
        try:
            common = selected(self._state, {**self.flat.empty, **self.flat.common})
            return dump_object({} if common is ABSENT else common, COMMON_KEY)
        except CheckpointingException:
            for path, value in self.flat.common.items():
                for name, inner in _stock_leaves(path, value):
                    dump_object(inner, name)  # raises with the name of the value
            raise

    def parts(self) -> Iterator[tuple[str, Box, Tensor]]:
        """The key, box and values of each part of a tensor that this rank writes; values are views of its memory.

        Raises:
            CheckpointingException: the plan does not fit what this rank holds.
        """
        boxes = [(own.shard, box) for own in self._held for box in own.boxes]
        columns = (self.assigned.box.tolist(), self.assigned.offsets.tolist(), self.assigned.sizes.tolist())
        for number, offsets, sizes in zip(*columns, strict=True):
            shard, held = boxes[number]
            axes = len(held.box.sizes)
            part = Box(tuple(offsets[:axes]), tuple(sizes[:axes]))
            if part != held.box and held.box.overlap(part) != part:
                raise CheckpointValueError(f"{shard.key}: the plan wants {part} of the box {held.box}")
            yield shard.key, part, view_of(shard, held, part)


def stock_values(flat: FlatState) -> dict[str, Any]:
    """The plain values that `torch.distributed.checkpoint.load` looks for, by its keys: paths that continue into lists.

    Values in scoped parts are left out: they describe optimizers in the form of this package.
    """
    parts = tuple(path for path, _ in scopes(flat.state) if path)
    values: dict[str, Any] = {}
    for path in flat.common:
        if not any(path[: len(part)] == part for part in parts):
            values.update(_stock_leaves(path, lookup(flat.state, path)))
    return values


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
