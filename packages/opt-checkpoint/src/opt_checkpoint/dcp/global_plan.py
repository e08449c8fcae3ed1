"""The plan of a save: a function of what all ranks hold, so that it can be cached for the next save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from opt_checkpoint.dcp.balance import Parts, assign_parts
from opt_checkpoint.dcp.held_tensors import HeldTensors, Repeats
from opt_checkpoint.dcp.local_contents import LocalLayout
from opt_checkpoint.dcp.validation import validate_sharding_integrity
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
        held: what all ranks hold.
        objects: unique keys of the objects that each rank writes.
        repeats: blocks that several ranks hold; their values must be equal in each save.
        parts: the parts of tensors that ranks write.
        layouts: the layouts that the plan was made from.
        only_first: whether only the first rank that holds a plain tensor may write it.
    """

    held: HeldTensors
    objects: list[list[str]]
    repeats: Repeats
    parts: Parts
    layouts: Sequence[LocalLayout]
    only_first: bool

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
        held = HeldTensors.of([own.tensors for own in layouts]).with_plain_on_one(only_first=only_first)
        repeats = held.repeats()
        settled = held.with_one_main_each(repeats, digests)
        validate_sharding_integrity(settled, [own.objects for own in layouts])
        return cls(
            held=held,
            objects=[[o.unique_key for o in own.objects if o.main] for own in layouts],
            repeats=repeats,
            parts=assign_parts(settled),
            layouts=layouts,
            only_first=only_first,
        )

    def check_values(self, digests: Array) -> None:
        """Check that the values of a later save with the same layouts allow the same plan.

        Raises:
            CheckpointingException: ranks that hold the same block have different values for it.
        """
        if not self.repeats.are_equal(self.held, digests).all():
            GlobalPlan.of(self.layouts, digests, only_first=self.only_first)
            raise CheckpointValueError("values that several ranks hold as main replicas differ")

    @property
    def parts_nbytes(self) -> Array:
        """(p,) bytes of the values of each part."""
        parts = self.parts
        nbytes: Array = np.prod(parts.sizes, axis=1) * self.held.itemsize[self.held.owner[parts.box]]
        return nbytes

    def assigned(self) -> list[AssignedParts]:
        """The parts that each rank writes, by rank."""
        local = self.parts.box - self.held.first_box[self.parts.rank]
        bounds = np.searchsorted(self.parts.rank, np.arange(self.held.ranks + 1)).tolist()
        return [
            AssignedParts(local[a:b], self.parts.offsets[a:b], self.parts.sizes[a:b], own)
            for a, b, own in zip(bounds, bounds[1:], self.objects)
        ]
