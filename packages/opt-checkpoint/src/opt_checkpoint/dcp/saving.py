"""The phases of a save: what a rank knows after each of them is a value, and a function makes the next one from it.

    all ranks    describe                        -> Held       what the rank holds; it offers the fingerprints to all
    all ranks    agree        from all offers    -> Agreed     whether all ranks have cached the plan that is needed
    rank 0       assign       from all contents  -> Assigned   which rank writes which parts and objects
    all ranks    take         from rank 0        -> Taken      what this rank writes, as views of its memory
    all ranks    `Writer.write`                                a file of its own, see `writing`
    rank 0       `Writer.finish`                               checks, index, commit

`run.save_load.carry_out_save` calls them, and lists the collectives between them. Rank 0 decides who writes what:

    a box that one rank has      that rank, whole
    a box that several have      `plan.assign_parts`: the least loaded of them, then the lowest; of one above a twelfth
                                 of a rank's share and 64 KiB, rows each. A main replica says that a box must be
                                 written, not by whom
    plain tensors                the same; under `"first_rank"`, the first rank that has it; without `lists_values`, as
                                 other plain values
    sharded objects              the rank with the main replica
    other plain values           rank 0, together; with `lists_values`, also under their keys, for stock readers
    metadata, manifest, commit   rank 0, after all files are synced: `Store.commit` renames a directory, or creates the
                                 `commit.json` of a bucket

Every rank writes a file, even if it has nothing to write.

The local tier does not plan: each rank writes all that it holds (`tiers.parts.save_part`).

Nothing here is kept after the save, except for what `to_cache` returns: `Held` and `Taken` refer to the memory of the
model.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from opt_checkpoint.boxes import Box, boxes_of, view_of
from opt_checkpoint.dcp.coverage import common_differences, without_writer
from opt_checkpoint.dcp.layout import LocalContents, Shards, local_contents
from opt_checkpoint.dcp.plan import AssignedParts, CachedPlan, GlobalPlan, Offer
from opt_checkpoint.disk.archives import archive_of, dump_object
from opt_checkpoint.disk.index import COMMON_KEY
from opt_checkpoint.errors import CheckpointingException, CheckpointValueError, check_choice
from opt_checkpoint.state.sharded import Path, ShardedStateDict, items_of, path_text
from opt_checkpoint.state.tree import FlatState, flatten_state, is_below, lookup, scopes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this rank holds. Local.

    Args:
        rank: this process's number among those that save.
        policy: what to do if plain values differ on another rank: `"equal"` refuses to save, `"first_rank"` takes rank
            0's; of a plain tensor, those of the first rank that has it.
        flat: the state; no tensor is inside a plain value.
        shards: its tensors and their boxes, in the order in which `LocalLayout` numbers boxes.
        contents: their description.
        cached: the plan of an earlier save; empty if it was made for another rank number.
    """

    rank: int
    policy: str
    flat: FlatState
    shards: Shards
    contents: LocalContents
    cached: CachedPlan


class Agreed(NamedTuple):
    """What follows from the offers of all ranks; the same on every rank.

    Args:
        plan_name: the name of the plan that this save needs: a hash of the policy and the layouts of all ranks.
        is_cached: whether every rank has cached it.
        has_equal_common: whether plain values are equal on all ranks.
    """

    plan_name: bytes
    is_cached: bool
    has_equal_common: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """What every rank writes. On rank 0 only.

    Args:
        plan: the parts of tensors, by rank.
        to_ranks: what each rank is sent of it; None if it has it cached.
        stock: the plain values that rank 0 also writes on their own, for stock readers, by key.
    """

    plan: GlobalPlan
    to_ranks: Sequence[AssignedParts | None]
    stock: Mapping[str, Any]


def describe(state: ShardedStateDict, rank: int, *, policy: str, cached: CachedPlan, lists_values: bool) -> Held:
    """Flatten a state, and describe what ranks must agree on before they plan.

    With `lists_values`, plain tensors are stored as tensors, else as common values.

    Raises:
        CheckpointingException: the state cannot be flattened or stored.
    """
    check_choice("common", policy, ("equal", "first_rank"))
    flat = flatten_state(state, saves=True)
    if lists_values:
        flat.separate_tensors_()
    else:
        flat.join_tensors_()
    shards = [(shard, tuple(boxes_of(shard))) for shard in flat.tensors.values()]
    # If two ranks with equal layouts swap their numbers, different plans have the same name.
    usable = cached if cached.rank == rank else CachedPlan()
    contents = local_contents(flat, shards)
    return Held(rank=rank, policy=policy, flat=flat, shards=shards, contents=contents, cached=usable)


def offer_of(held: Held, arguments: Mapping[str, str]) -> Offer:
    """Return the message to all ranks.

    Args:
        held: what this rank holds.
        arguments: of the save; they must be the same on all ranks.
    """
    layout = held.contents.layout
    assert layout is not None  # the whole description, of which `contents_for` may leave out a part
    common = "".join(sorted(map(repr, held.contents.common.items())))
    digest = hashlib.sha256(common.encode("utf-8", "surrogatepass")).digest()
    return Offer(arguments, layout.fingerprint, digest, held.cached.name)


def agree(policy: str, offers: Sequence[Offer]) -> Agreed:
    """Decide from the offers of all ranks, which each of them has, whether to reuse a cached plan."""
    layouts = [offer.layout for offer in offers]
    name = hashlib.sha256(b"".join([policy.encode(), b"\0", *layouts])).digest()
    common = {offer.common for offer in offers}
    return Agreed(name, is_cached={offer.cached for offer in offers} == {name}, has_equal_common=len(common) == 1)


def contents_for(held: Held, agreed: Agreed) -> LocalContents:
    """Return the message to rank 0: the description, without what rank 0 has cached or need not compare."""
    contents = held.contents
    if agreed.is_cached:
        contents = contents._replace(layout=None)
    if agreed.has_equal_common:
        contents = contents._replace(common={})
    return contents


def assign(held: Held, agreed: Agreed, contents: Sequence[LocalContents], *, lists_values: bool) -> Assigned:
    """Validate what all ranks hold and assign it to ranks; or reuse the plan that all ranks have cached. On rank 0.

    Args:
        held: what rank 0 holds.
        agreed: what follows from the offers.
        contents: the message of each rank.
        lists_values: whether to assign rank 0 a copy of each plain value, for stock readers.

    Raises:
        CheckpointingException: the ranks' shards leave gaps, overlap or disagree in shape.
    """
    cached = held.cached.plan if agreed.is_cached else None
    layouts = cached.layouts if cached else [of_rank.layout for of_rank in contents if of_rank.layout is not None]
    if not agreed.has_equal_common:
        common = [of_rank.common for of_rank in contents]
        plain = [layout.plain for layout in layouts]
        if differing := common_differences(common, plain):
            text = f"common values differ between ranks: {', '.join(differing[:8])}"
            if any(".names (" in value or ".state_names." in value for value in differing):
                text += "; if ranks have parts of one model, pass sharded_optimizer(model, optimizer, groups=...)"
            if held.policy == "equal":
                raise CheckpointValueError(
                    f"{text}; make values ShardedObjects and tensors ShardedTensors (sharded_like(key, tensor) where "
                    f"only some ranks have it), or pass common='first_rank' to store the first rank's"
                )
            if lost := without_writer(common, plain):
                raise CheckpointValueError(
                    f"common='first_rank' stores the plain values of rank 0, which lacks {', '.join(lost[:8])}; give "
                    "it these values, too, or make them ShardedObjects"
                )
            logger.warning("%s; those of the first rank are stored", text)
    digests = np.concatenate([of_rank.digests for of_rank in contents])
    if cached is None or not cached.fits(digests):  # a new plan says which values differ
        plan = GlobalPlan.of(layouts, digests, first_holder_only=held.policy == "first_rank")
        to_ranks: Sequence[AssignedParts | None] = plan.assigned
    else:
        plan = cached
        to_ranks = [None] * len(contents)
    # Stock `load` looks for plain values by their paths, which continue into lists; not for those of a `ScopedState`,
    # which describes an optimizer in the form of this package.
    flat = held.flat
    scoped = [path for path, _ in scopes(flat.state) if path]
    stock: dict[str, Any] = {}
    for path in flat.common if lists_values else ():
        if not is_below(path, scoped):
            stock.update(_stock_leaves(path, lookup(flat.state, path)))
    others = {COMMON_KEY, *plan.tensors.keys}.union(*(parts.objects for parts in plan.assigned))
    for key in stock.keys() & others:
        del stock[key]
    return Assigned(plan=plan, to_ranks=to_ranks, stock=stock)


def _stock_leaves(path: Path, value: Any) -> Iterator[tuple[str, Any]]:
    if _is_traversed(value):
        for key, inner in items_of(value):
            yield from _stock_leaves((*path, key), inner)
    elif not isinstance(value, Tensor):
        yield path_text(path), value


def _is_traversed(value: Any) -> bool:
    """Whether stock DCP gives each value inside a key of its own: of a dict, and of a list with tensors or dicts in it.
    Other lists, and all tuples, are objects."""
    is_list = isinstance(value, list)
    return isinstance(value, dict) or (is_list and any(isinstance(v, Tensor) or _is_traversed(v) for v in value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What this rank writes, in the order of its file: objects, then parts.

    Args:
        held: what it holds.
        own_parts: the parts, in the order of the plan: boxes that no other rank holds, in the order of the state; then
            shared ones in the order in which `assign_parts` chose this rank.
        stock: on rank 0, the plain values that it also writes on their own, by key; else None.
    """

    held: Held
    own_parts: AssignedParts
    stock: Mapping[str, Any] | None

    def objects(self) -> Iterator[tuple[str, bytes]]:
        """Yield the key and bytes of each object: sharded ones; then, on rank 0, the common state and its values.

        Raises:
            CheckpointingException: an object cannot be stored.
        """
        flat = self.held.flat
        objects = {item.unique_key: item.data for item in flat.objects.values()}
        for key in self.own_parts.objects:
            yield key, dump_object(objects[key], key)
        if self.stock is None:
            return
        try:
            common = dump_object(flat.nested_common(), COMMON_KEY)
        except CheckpointingException:
            for path, value in flat.common.items():
                for name, inner in _stock_leaves(path, value):
                    dump_object(inner, name)  # raises an error that names the value
            raise
        yield COMMON_KEY, common
        for key, value in self.stock.items():
            # As `torch.distributed.checkpoint` stores it; encoding the common state has checked that it loads.
            yield key, archive_of(value)

    def parts(self) -> Iterator[tuple[str, Box, Tensor]]:
        """Yield the key, box and values of each part of a tensor; values are views of this rank's memory.

        Raises:
            CheckpointingException: the plan does not fit what this rank holds.
        """
        boxes = [(shard, box) for shard, of_shard in self.held.shards for box in of_shard]
        columns = (self.own_parts.box, self.own_parts.offsets, self.own_parts.sizes)
        for number, offsets, sizes in zip(*(column.tolist() for column in columns), strict=True):
            shard, flat_box = boxes[number]
            axes = len(flat_box.box.sizes)
            part = Box(tuple(offsets[:axes]), tuple(sizes[:axes]))
            if flat_box.box.overlap(part) != part:
                raise CheckpointValueError(f"{shard.key}: the plan wants {part} of the box {flat_box.box}")
            yield shard.key, part, view_of(shard, flat_box, part)


def take(held: Held, sent: AssignedParts | None, assigned: Assigned | None) -> Taken:
    """Resolve what rank 0 has assigned to this rank.

    Args:
        held: what this rank holds.
        sent: the message of rank 0; None for what this rank has cached.
        assigned: on rank 0, what every rank writes; else None.
    """
    parts = sent or held.cached.assigned
    assert parts is not None  # a rank without a cached plan does not agree to use one
    return Taken(held=held, own_parts=parts, stock=None if assigned is None else assigned.stock)


def to_cache(agreed: Agreed, taken: Taken, assigned: Assigned | None) -> CachedPlan:
    """Return what this rank keeps for the next save; arguments are as for `take`."""
    plan = None if assigned is None else assigned.plan
    return CachedPlan(agreed.plan_name, taken.held.rank, taken.own_parts, plan)
