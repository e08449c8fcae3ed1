"""Plans cached from one save to the next, and the agreement of all ranks that a plan is still valid.

A plan is a function of what all ranks hold: keys, dtypes, shapes, boxes, replicas, objects. Its name is a hash of the
ranks' fingerprints of these. Before a save, every rank sends the fingerprint of what it holds now, and the name of the
plan that it has cached. All ranks see the same offers, and reuse the plan only if every rank has cached the one that
this save needs. A restarted rank, another number or order of ranks, or a tensor of another shape makes all ranks make a
new plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from opt_checkpoint.dcp.global_plan import AssignedParts, GlobalPlan


class Offer(NamedTuple):
    """What a rank sends to all others before a save.

    Args:
        layout: fingerprint of what it holds.
        common: fingerprint of its plain values.
        remembered: name of the plan that it has cached; empty for none.
    """

    layout: bytes
    common: bytes
    remembered: bytes


class Agreement(NamedTuple):
    """What follows from the offers of all ranks; the same on each of them.

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
    """The plan of the last save of a series; make one on each rank, and pass it to each save.

    Half a million chunks take seconds to plan. With a cache, later saves send a fingerprint instead of a description of
    what the ranks hold. `AsyncSaver` and `CheckpointManager` have one of their own.
    """

    def __init__(self) -> None:
        self._plan = CachedPlan()

    def plan_of(self, rank: int) -> CachedPlan:
        """The plan that is cached for a rank; an empty one where there is none.

        Two ranks with equal layouts that changed places have the same name for different plans, so the rank matters. A
        save asks once, at its start: another save may replace the plan at any time.
        """
        plan = self._plan
        return plan if plan.rank == rank else CachedPlan()

    def keep(self, plan: CachedPlan) -> None:
        """Replace the cached plan."""
        self._plan = plan
