"""Plans cached from one save to the next, and the agreement of all ranks that a plan is still valid.

A plan is a function of what all ranks hold: keys, dtypes, shapes, boxes, replicas, objects. Its name is a hash of the
fingerprints of all ranks. Before a save, every rank sends the fingerprint of what it holds now, and the name of its
cached plan. All ranks receive the same messages, and reuse the plan only if every rank has cached the one that this
save needs. After a restart of a rank, or if the number or order of ranks or the shape of a tensor changes, all ranks
make a new plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from opt_checkpoint.dcp.global_plan import AssignedParts, GlobalPlan


class Offer(NamedTuple):
    """The message of a rank to all others before a save.

    Args:
        layout: fingerprint of what the rank holds.
        common: fingerprint of its plain values.
        remembered: name of the plan that it has cached; empty for none.
    """

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
