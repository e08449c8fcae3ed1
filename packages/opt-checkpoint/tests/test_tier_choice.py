"""Which step a run resumes from, and who keeps whose copy: functions of what the ranks see."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from opt_checkpoint.tiers.local_tier import NOTHING, keepers, newest_whole
from opt_checkpoint.tiers.parts import PartName


def part(rank: int, step: int = 1, save: str = "a", world: int = 2, run: str = "run") -> PartName:
    """A part by the fields that a case is about."""
    return PartName(run, step, save, rank, world)


def seen(*per_rank: Sequence[PartName]) -> list[set[PartName]]:
    """Inventories of ranks that see these parts."""
    return [set(own) for own in per_rank]


WHOLE = {
    "each sees its own": (seen([part(0)], [part(1)]), 1, (0, 1)),
    "a lost node's part is taken from its copy": (seen([part(0), part(1)], []), 1, (0, 0)),
    "an own part is preferred to a copy": (seen([part(0), part(1)], [part(0), part(1)]), 1, (0, 1)),
    "ranks that changed places": (seen([part(1)], [part(0)]), 1, (1, 0)),
    "the newest of several": (seen([part(0), part(0, 2)], [part(1), part(1, 2)]), 2, (0, 1)),
    "a half-written newest is passed over": (seen([part(0), part(0, 2)], [part(1)]), 1, (0, 1)),
    "parts of two saves are no step": (seen([part(0), part(0, 2, "b")], [part(1), part(1, 2, "c")]), 1, (0, 1)),
    "a whole save beside half of another": (seen([part(0, 2, "b"), part(0, 2, "c")], [part(1, 2, "b")]), 2, (0, 1)),
    "another run's newer parts": (
        seen([part(0), part(0, 9, run="other")], [part(1), part(1, 9, run="other")]), 1, (0, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_the_newest_step_of_which_every_part_is_somewhere_is_chosen(case: str) -> None:
    inventories, step, holders = WHOLE[case]
    verdict = newest_whole(inventories, run="run", not_before=0)
    assert verdict.local is not None
    assert (verdict.local.step, verdict.local.holders) == (step, holders)
    saved = {part for seen in inventories for part in seen if (part.step, part.save) == (step, verdict.local.save)}
    assert {part.rank for part in saved} == {0, 1}


NONE = {
    "nothing": (seen([], []), ()),
    "one part is lost": (seen([part(0)], []), ("step 1 of the local tier: the parts of ranks [1] are on no node",)),
    "another world": (
        seen([part(0, world=3)], [part(1, world=3), part(2, world=3)]),
        ("step 1 of the local tier: it was saved by 3 ranks, and this world has 2",),
    ),
    "two whole saves of one step": (
        seen([part(0), part(0, save="b")], [part(1), part(1, save="b")]),
        ("step 1 of the local tier: it was saved 2 times, and all of them are whole",),
    ),
    "only another run": (seen([part(0, run="other")], [part(1, run="other")]), ()),
}


UNUSABLE = ("another world", "two whole saves of one step")


@pytest.mark.parametrize("case", NONE)
def test_where_no_step_is_whole_none_is_chosen_and_the_reason_is_given(case: str) -> None:
    inventories, reasons = NONE[case]
    verdict = newest_whole(inventories, run="run", not_before=0)
    assert (verdict.local, verdict.passed_over) == (None, reasons)
    assert verdict.unusable == (reasons if case in UNUSABLE else ())


def test_steps_older_than_the_durable_one_are_not_looked_at() -> None:
    assert newest_whole(seen([part(0)], [part(1)]), run="run", not_before=2) == NOTHING


KEEPERS = {
    "one node": (["a", "a"], None),
    "one rank": (["a"], None),
    "two nodes of one": (["a", "b"], [1, 0]),
    "two nodes of two": (["a", "a", "b", "b"], [2, 3, 0, 1]),
    "three nodes": (["a", "b", "c"], [1, 2, 0]),
    "ranks dealt out in turn": (["a", "b", "a", "b"], [1, 0, 3, 2]),
    "nodes of different sizes": (["a", "a", "a", "b"], [3, 3, 3, 0]),
}


@pytest.mark.parametrize("case", KEEPERS)
def test_every_copy_is_kept_on_another_node(case: str) -> None:
    nodes, expected = KEEPERS[case]
    found = keepers(nodes)
    assert found == expected
    if found is not None:
        assert all(nodes[keeper] != nodes[rank] for rank, keeper in enumerate(found))
