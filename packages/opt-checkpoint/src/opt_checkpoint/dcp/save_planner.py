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
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opt_checkpoint.boxes.box import Box, FlatBox
from opt_checkpoint.dcp.global_plan import AssignedParts, GlobalPlan
from opt_checkpoint.dcp.local_contents import HeldShard, LocalContents, held_shards, local_contents
from opt_checkpoint.dcp.plan_cache import Agreement, CachedPlan, Offer, PlanCache
from opt_checkpoint.dcp.validation import common_differences
from opt_checkpoint.disk.dtype_names import is_storable
from opt_checkpoint.disk.index import COMMON_KEY
from opt_checkpoint.disk.torch_zip_reader import dump_object
from opt_checkpoint.errors import CheckpointingException, CheckpointValueError
from opt_checkpoint.state.flat_state import FlatState, flatten_state, separate_tensors_
from opt_checkpoint.state.sharded import ShardedStateDict, ShardedTensor
from opt_checkpoint.state.tree import ABSENT, Path, lookup, path_text, scopes, selected

logger = logging.getLogger(__name__)


class Common(Enum):
    """What to do when plain values, which rank 0 writes, differ on another rank."""

    EQUAL = "equal"  # refuse to save, naming the values
    FIRST_RANK = "first_rank"  # take rank 0's, and log what differs


class Planned(NamedTuple):
    """A plan with the objects that rank 0 writes for all.

    Args:
        plan: the plan.
        objects: unique keys of the objects that each rank writes.
        stock_only: keys of the plain values that rank 0 also writes on their own, for stock readers.
    """

    plan: GlobalPlan
    objects: list[list[str]]
    stock_only: frozenset[str]


def view_of(shard: ShardedTensor, held: FlatBox, part: Box) -> Tensor:
    """Return the values of `part`, a box within a held box, as a view of the shard's data.

    Args:
        shard: the shard, with data.
        held: one of `boxes_of(shard)`.
        part: a box inside `held.box`, in global coordinates.
    """
    whole = _data(shard).detach()
    if shard.flattened_range is not None:
        whole = whole[held.start : held.stop].view(held.box.sizes)
    elif shard.prepend_axis_num:
        whole = whole[(None,) * shard.prepend_axis_num]
    if part != held.box:
        for axis, (low, base, size) in enumerate(zip(part.offsets, held.box.offsets, part.sizes)):
            whole = whole.narrow(axis, low - base, size)
    return whole


def _data(shard: ShardedTensor) -> Tensor:
    if shard.data is None:
        raise CheckpointValueError(f"{shard.key} has no data")
    if shard.flattened_range is not None and not shard.data.is_contiguous():
        raise CheckpointValueError(f"{shard.key} holds a flat range in memory that is not contiguous")
    return shard.data


class ShardedSavePlanner:
    """Plans the save of one nested state of sharded types. Plans are columns of integers.

    Args:
        state: nested dicts of sharded types and plain values.
        common: what to do when ranks disagree on a plain value.
        cache: the plan of an earlier save.
    """

    def __init__(
        self, state: ShardedStateDict, *, common: Common = Common.EQUAL, cache: PlanCache | None = None
    ) -> None:
        self._state = state
        self._policy = common
        self._cache = cache or PlanCache()
        self._agreement = Agreement(plan=b"", is_remembered=False, equal_common=False)
        self._rank, self._cached = -1, CachedPlan()
        self._plan: GlobalPlan | None = None
        self._first_ranks_objects: list[str] = []
        self._stock_values: dict[str, Any] = {}
        self._assigned: AssignedParts | None = None

    def offer(self, rank: int) -> Offer:
        """Flatten the state, and describe what ranks must agree on before they plan.

        Args:
            rank: this process's number among those that save.

        Raises:
            CheckpointingException: the state cannot be flattened or stored.
        """
        contents = self._contents
        if contents.layout is None:
            raise RuntimeError("a rank has a layout of its own")
        common = hashlib.sha256("".join(sorted(map(repr, contents.common.items()))).encode("utf-8", "surrogatepass"))
        self._rank, self._cached = rank, self._cache.plan_of(rank)
        return Offer(contents.layout.fingerprint, common.digest(), self._cached.name)

    def accept(self, offers: Sequence[Offer]) -> None:
        """Decide from the offers of all ranks whether to reuse a cached plan; without this call, none is reused."""
        self._agreement = Agreement.of(offers, self._policy.value)

    @cached_property
    def flat(self) -> FlatState:
        """The state by kind and path."""
        flat = flatten_state(self._state)
        separate_tensors_(flat, is_storable)
        return flat

    @cached_property
    def _held(self) -> list[HeldShard]:
        return held_shards(self.flat)

    @cached_property
    def _contents(self) -> LocalContents:
        return local_contents(self.flat, self._held)

    def create_local_plan(self) -> LocalContents:
        """Describe what this rank could write; with a cached plan, only what depends on values."""
        contents = self._contents
        if self._agreement.is_remembered:
            contents = replace(contents, layout=None)
        if self._agreement.equal_common:
            contents = replace(contents, common={})
        return contents

    def create_global_plan(self, contents: Sequence[LocalContents]) -> tuple[list[AssignedParts | None], Planned]:
        """Validate what all ranks hold and assign it to ranks; or reuse the plan that all ranks have cached.

        Returns:
            What each rank writes, None for what it has cached; and the plan.

        Raises:
            CheckpointingException: the states of the ranks do not fit together.
        """
        digests = np.concatenate([own.digests for own in contents])
        remembered = self._cached.plan if self._agreement.is_remembered else None
        layouts = remembered.layouts if remembered else [own.layout for own in contents if own.layout is not None]
        self._judge_common(contents, [own.plain for own in layouts])
        if remembered is None:
            plan = GlobalPlan.of(layouts, digests, only_first=self._policy is Common.FIRST_RANK)
        else:
            plan = remembered
            plan.check_values(digests)
        assigned: list[AssignedParts | None] = [None] * len(contents) if remembered else [*plan.assigned()]
        self._plan, self._stock_values = plan, stock_values(self.flat)
        stock_only = self._stock_values.keys() - plan.held.keys
        self._first_ranks_objects = [COMMON_KEY, *(key for key in self._stock_values if key in stock_only)]
        objects = [[*plan.objects[0], *self._first_ranks_objects], *plan.objects[1:]]
        return assigned, Planned(plan, objects, frozenset(stock_only))

    def _judge_common(self, contents: Sequence[LocalContents], plain: Sequence[Mapping[str, Path]]) -> None:
        if self._agreement.equal_common:
            return
        differing = common_differences([own.common for own in contents], plain)
        if not differing:
            return
        text = f"common values differ between ranks: {', '.join(differing[:8])}"
        if self._policy is Common.EQUAL:
            raise CheckpointValueError(
                f"{text}; make values ShardedObjects and tensors ShardedTensors (sharded_like(key, tensor) where only "
                f"some ranks have it), or pass common='first_rank' to store the first rank's"
            )
        logger.warning("%s; rank 0's are stored", text)

    def finish_plan(self, assigned: AssignedParts | None) -> None:
        """Take what this rank writes from the coordinator, or from the cached plan for None; cache it."""
        self._assigned = assigned or self._cached.assigned
        if self._assigned is None:
            raise RuntimeError("a rank without a cached plan agreed to use one")
        if self._agreement.plan:
            self._cache.keep(CachedPlan(self._agreement.plan, self._rank, self._assigned, self._plan))

    @property
    def assigned(self) -> AssignedParts:
        """What this rank writes, after `finish_plan`."""
        if self._assigned is None:
            raise RuntimeError("finish_plan was not called")
        return self._assigned

    def objects(self) -> Iterator[tuple[str, bytes]]:
        """The keys and bytes of the objects that this rank writes.

        Raises:
            CheckpointingException: an object cannot be stored.
        """
        for key in (*self.assigned.objects, *self._first_ranks_objects):
            is_bare = key in self._stock_values
            yield key, _bare_archive(self._stock_values[key]) if is_bare else self._dumped(key)

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

    def _dumped(self, key: str) -> bytes:
        if key != COMMON_KEY:
            return dump_object(next(o.data for o in self.flat.objects.values() if o.unique_key == key), key)
        try:
            common = selected(self._state, {**self.flat.empty, **self.flat.common})
            return dump_object({} if common is ABSENT else common, key)
        except CheckpointingException:
            for path, value in self.flat.common.items():
                for name, inner in _stock_leaves(path, value):
                    dump_object(inner, name)  # raises with the name of the value
            raise


def _bare_archive(value: Any) -> bytes:
    """A value as `torch.distributed.checkpoint` stores it. Encoding the common state has checked that it loads."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


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
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _stock_leaves((*path, key), inner)
    elif not isinstance(value, Tensor):
        yield path_text(path), value


def _is_traversed(values: list[Any]) -> bool:
    """Whether stock DCP gives each element of a list a key; other lists, and all tuples, are objects."""
    return any(isinstance(v, Tensor | dict) or (isinstance(v, list) and _is_traversed(v)) for v in values)
