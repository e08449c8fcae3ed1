"""Which step a run resumes from, and who keeps whose copy: functions of what the ranks see."""

from __future__ import annotations

from opt_checkpoint.tiers.local_tier import NOTHING, keepers, newest_whole
from opt_checkpoint.tiers.parts import PartName


def part(rank: int, step: int = 1, save: str = "a", world: int = 2, run: str = "run") -> PartName:
    return PartName(run, step, save, rank, world)


A, B, C = part(0), part(1), part(0, 2)
WHOLE = {  # what each of two ranks sees; the step that is chosen; who holds the part of each rank
    "each sees its own": ([A], [B], 1, (0, 1)),
    "a lost node's part is taken from its copy": ([A, B], [], 1, (0, 0)),
    "an own part is preferred to a copy": ([A, B], [A, B], 1, (0, 1)),
    "ranks that changed places": ([B], [A], 1, (1, 0)),
    "the newest of several": ([A, C], [B, part(1, 2)], 2, (0, 1)),
    "a half-written newest is passed over": ([A, C], [B], 1, (0, 1)),
    "parts of two saves are no step": ([A, part(0, 2, "b")], [B, part(1, 2, "c")], 1, (0, 1)),
    "a whole save beside half of another": ([part(0, 2, "b"), part(0, 2, "c")], [part(1, 2, "b")], 2, (0, 1)),
    "another run's newer parts": ([A, part(0, 9, run="other")], [B, part(1, 9, run="other")], 1, (0, 1)),
}


def test_the_newest_step_of_which_every_part_is_somewhere_is_chosen() -> None:
    for case, (first, second, step, holders) in WHOLE.items():
        chosen = newest_whole([set(first), set(second)], run="run", not_before=0).local
        assert chosen is not None, case
        assert (chosen.step, chosen.holders) == (step, holders), case
        saved = {seen.rank for seen in first + second if (seen.step, seen.save) == (step, chosen.save)}
        assert saved == {0, 1}, case


PREFIX = "step 1 of the local tier: "
NONE = {  # what each of two ranks sees; the reason; whether the step could be used elsewhere
    "nothing": ([], [], "", False),
    "one part is lost": ([A], [], "the parts of ranks [1] are on no node", False),
    "another world": ([part(0, world=3)], [part(1, world=3), part(2, world=3)],
                      "it was saved by 3 ranks, and this world has 2", True),
    "two whole saves of one step": ([A, part(0, save="b")], [B, part(1, save="b")],
                                    "it was saved 2 times, and all of them are whole", True),
    "only another run": ([part(0, run="other")], [part(1, run="other")], "", False),
}  # fmt: skip


def test_where_no_step_is_whole_none_is_chosen_and_the_reason_is_given() -> None:
    for case, (first, second, reason, is_unusable) in NONE.items():
        verdict = newest_whole([set(first), set(second)], run="run", not_before=0)
        reasons = (PREFIX + reason,) if reason else ()
        assert (verdict.local, verdict.passed_over) == (None, reasons), case
        assert verdict.unusable == (reasons if is_unusable else ()), case
    assert newest_whole([{A}, {B}], run="run", not_before=2) == NOTHING  # the durable tier has a newer one


def test_every_copy_is_kept_on_another_node() -> None:
    assert keepers(["a", "a"]) is keepers(["a"]) is None
    assert keepers(["a", "b"]) == [1, 0]
    assert keepers(["a", "a", "b", "b"]) == [2, 3, 0, 1]
    assert keepers(["a", "b", "c"]) == [1, 2, 0]
    assert keepers(["a", "b", "a", "b"]) == [1, 0, 3, 2]
    assert keepers(["a", "a", "a", "b"]) == [3, 3, 3, 0]
