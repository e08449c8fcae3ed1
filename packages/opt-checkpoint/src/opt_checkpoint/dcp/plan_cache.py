"""Plans remembered from one save to the next, and how ranks agree that they still hold.

A plan is a function of what all ranks hold: keys, dtypes, shapes, boxes, replicas, objects. It is remembered under the
fingerprints of just that, by rank. Before a save, every rank sends the fingerprint of what it holds now and of what it
remembers a plan for. Only if all of them match, on all ranks, is the plan used again; all ranks see the same
fingerprints and come to the same verdict. So a rank that was restarted, another number or order of ranks, or a tensor
of another shape makes all ranks plan anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from opt_checkpoint.dcp.global_plan import AssignedParts, GlobalPlan


class Offer(NamedTuple):
    """What a rank tells all others before a save.

    Args:
        layout: fingerprint of what it holds.
        common: fingerprint of its plain values.
        remembered: names the plan that it remembers; empty for none.
    """

    layout: bytes
    common: bytes
    remembered: bytes


class Agreement(NamedTuple):
    """What follows from the offers of all ranks, the same on each of them.

    Args:
        plan: names the plan that this save needs.
        is_remembered: whether all ranks remember it.
        equal_common: whether all ranks have the same plain values.
    """

    plan: bytes
    is_remembered: bool
    equal_common: bool

    @classmethod
    def of(cls, offers: Sequence[Offer], policy: str) -> Agreement:
        """The verdict on the offers of all ranks, by rank.

        Args:
            offers: of all ranks.
            policy: what else a plan depends on.
        """
        plan = hashlib.sha256(b"".join([policy.encode(), b"\0", *(offer.layout for offer in offers)])).digest()
        return cls(
            plan=plan,
            is_remembered=all(offer.remembered == plan for offer in offers),
            equal_common=len({offer.common for offer in offers}) == 1,
        )


class PlanCache:
    """The plan of the last save of a series; make one on each rank, and give it to each save.

    Half a million pieces take seconds to plan. With a cache, a save after the first sends a fingerprint in place of
    what the ranks hold. `AsyncSaver` and `CheckpointManager` have one of their own.
    """

    def __init__(self) -> None:
        self._name, self._rank = b"", -1
        self.assigned: AssignedParts | None = None
        self.plan: GlobalPlan | None = None

    def name_for(self, rank: int) -> bytes:
        """The name of the plan that is remembered for a rank; empty where there is none.

        Ranks with equal layouts that changed places have the same name for another plan, so the rank counts.
        """
        return self._name if self._rank == rank else b""

    def keep(self, name: bytes, rank: int, assigned: AssignedParts, plan: GlobalPlan | None) -> None:
        """Remember a plan by its name.

        Args:
            name: from the agreement of the save.
            rank: this rank.
            assigned: what it writes.
            plan: all of the plan, on the coordinator.
        """
        self._name, self._rank, self.assigned, self.plan = name, rank, assigned, plan
