"""The plan of a save: which rank writes which parts of what all ranks hold; cached from one save to the next.

A plan is a function of what all ranks hold: keys, dtypes, shapes, boxes, replicas, objects. Its name is a hash of the
fingerprints of all ranks. Before a save, every rank sends the fingerprint of what it holds now, and the name of its
cached plan. All ranks receive the same messages, and reuse the plan only if every rank has cached the one that this
save needs. After a restart of a rank, or if the number or order of ranks or the shape of a tensor changes, all ranks
make a new plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from opt_checkpoint.dcp.balance import Parts, assign_parts
from opt_checkpoint.dcp.coverage import validate_sharding_integrity
from opt_checkpoint.dcp.local_contents import LocalLayout
from opt_checkpoint.dcp.tensors_of_ranks import TensorsOfRanks
from opt_checkpoint.disk.checksums import crc32
from opt_checkpoint.disk.columns import Array
from opt_checkpoint.errors import CheckpointValueError


class AssignedParts(NamedTuple):
    """The parts that one rank writes.

    Args:
        box: (p,) indices of the rank's boxes, in the order in which it listed them.
        offsets: (p, axes) offsets of each part in its tensor; unused axes are last.
        sizes: (p, axes) its sizes.
        objects: unique keys of objects.
    """

    box: Array
    offsets: Array
    sizes: Array
    objects: list[str]

    @property
    def crc(self) -> int:
        """CRC-32 of the parts; the coordinator compares it to check that a rank wrote exactly these."""
        return crc32(np.concatenate([self.box, self.offsets.ravel(), self.sizes.ravel()]).tobytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalPlan:
    """Who writes what.

    Args:
        tensors: what all ranks hold.
        objects: unique keys of the objects that each rank writes.
        repeats: (pairs, 2) tensors that two ranks hold; their values must be equal in each save.
        parts: the parts of tensors that ranks write.
        layouts: the layouts that the plan was made from.
    """

    tensors: TensorsOfRanks
    objects: list[list[str]]
    repeats: Array
    parts: Parts
    layouts: Sequence[LocalLayout]

    @classmethod
    def of(cls, layouts: Sequence[LocalLayout], digests: Array, *, only_first: bool) -> GlobalPlan:
        """Validate what all ranks hold, and assign every part to a rank.

        Args:
            layouts: what each rank holds, by rank.
            digests: of all ranks' tensors that may repeat, concatenated.
            only_first: whether only the first rank that holds a plain tensor writes it, because the others may differ.

        Raises:
            CheckpointingException: the layouts do not fit together, or values that must be equal are not.
        """
        tensors = TensorsOfRanks.of(layouts, only_first=only_first)
        repeats = tensors.repeats()
        main = tensors.main.copy()  # the second of two equal blocks is a replica; validation rejects two that differ
        main[repeats[_are_equal(tensors, repeats, digests), 1]] = False
        checked = replace(tensors, main=main)
        validate_sharding_integrity(checked, [own.objects for own in layouts])
        objects = [[item.unique_key for item in own.objects if item.main] for own in layouts]
        return cls(tensors=tensors, objects=objects, repeats=repeats, parts=assign_parts(checked), layouts=layouts)

    def check_values(self, digests: Array) -> None:
        """Check that the values of a later save with the same layouts allow the same plan.

        Raises:
            CheckpointingException: ranks that hold the same block have different values for it.
        """
        if not _are_equal(self.tensors, self.repeats, digests).all():
            GlobalPlan.of(self.layouts, digests, only_first=False)
            raise CheckpointValueError("values that several ranks hold as main replicas differ")

    @property
    def parts_nbytes(self) -> Array:
        """(p,) bytes of the values of each part."""
        nbytes: Array = np.prod(self.parts.sizes, axis=1) * self.tensors.itemsize[self.tensors.owner[self.parts.box]]
        return nbytes

    def assigned(self) -> list[AssignedParts]:
        """The parts that each rank writes, by rank."""
        tensors, parts = self.tensors, self.parts
        first_box = np.searchsorted(tensors.rank[tensors.owner], np.arange(tensors.ranks))
        bounds = np.searchsorted(parts.rank, np.arange(tensors.ranks + 1)).tolist()
        local = parts.box - first_box[parts.rank]
        return [
            AssignedParts(local[a:b], parts.offsets[a:b], parts.sizes[a:b], own)
            for a, b, own in zip(bounds, bounds[1:], self.objects)
        ]


def _are_equal(tensors: TensorsOfRanks, repeats: Array, digests: Array) -> Array:
    """(pairs,) whether both tensors of each pair have equal values."""
    place = np.cumsum(tensors.may_repeat) - 1
    equal: Array = digests[place[repeats[:, 0]]] == digests[place[repeats[:, 1]]]
    return equal


class Offer(NamedTuple):
    """The message of a rank to all others before a save.

    Args:
        arguments: of the save, as text; they must be the same on all ranks.
        layout: fingerprint of what the rank holds.
        common: fingerprint of its plain values.
        remembered: name of the plan that it has cached; empty for none.
    """

    arguments: dict[str, str]
    layout: bytes
    common: bytes
    remembered: bytes


class Agreement(NamedTuple):
    """The result of comparing the offers of all ranks; the same on each of them.

    Args:
        plan: name of the plan that this save needs.
        is_remembered: whether all ranks have cached it.
        equal_common: whether all ranks have the same plain values.
    """

    plan: bytes
    is_remembered: bool
    equal_common: bool

    @classmethod
    def of(cls, offers: Sequence[Offer], policy: str) -> Agreement:
        """Return the agreement on the offers of all ranks.

        Args:
            offers: by rank.
            policy: what a plan depends on besides the layouts.
        """
        plan = hashlib.sha256(b"".join([policy.encode(), b"\0", *(offer.layout for offer in offers)])).digest()
        return cls(
            plan=plan,
            is_remembered=all(offer.remembered == plan for offer in offers),
            equal_common=len({offer.common for offer in offers}) == 1,
        )


class CachedPlan(NamedTuple):
    """A plan and the rank that it was made for; saves share it and never change it.

    Args:
        name: from the agreement of the save; empty for no plan.
        rank: this rank.
        assigned: what this rank writes.
        plan: all of the plan, on the coordinator.
    """

    name: bytes = b""
    rank: int = -1
    assigned: AssignedParts | None = None
    plan: GlobalPlan | None = None


class PlanCache:
    """Cache of the last plan in a series of saves. Create one on each rank, and pass it to each save.

    Planning half a million chunks takes seconds. With a cache, later saves send a fingerprint instead of a description
    of what the ranks hold. `AsyncSaver` and `CheckpointManager` create their own.
    """

    def __init__(self) -> None:
        self._plan = CachedPlan()

    def plan_of(self, rank: int) -> CachedPlan:
        """The plan that is cached for a rank; an empty plan if there is none.

        The rank matters: if two ranks with equal layouts swap their numbers, different plans have the same name. A save
        calls this once, at its start, because another save may replace the plan at any time.
        """
        plan = self._plan
        return plan if plan.rank == rank else CachedPlan()

    def keep(self, plan: CachedPlan) -> None:
        """Replace the cached plan."""
        self._plan = plan
