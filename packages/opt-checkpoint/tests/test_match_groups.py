"""Parameter groups by name: reordered, split, joined, changed; and Megatron-Core's identity tuple."""

from pathlib import Path
from typing import Any

import pytest
import torch

from opt_checkpoint import GroupMismatchError, apply_saved_groups, groups_to_saved, load, save

DECAY = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.01}
PLAIN = {"lr": 0.2, "betas": (0.9, 0.95), "weight_decay": 0.0}
SAVED = groups_to_saved([{**DECAY, "params": [1, 2]}, {**PLAIN, "params": [3]}], [["a", "b"], ["c"]])


def fresh(**changes: Any) -> dict[str, Any]:
    return {"params": ["untouched"], "lr": 9.0, "betas": (0.0, 0.0), "weight_decay": 9.0, **changes}


def applied(groups: list[dict[str, Any]], names: list[list[str]], saved: Any = SAVED, **options: Any) -> Any:
    report = apply_saved_groups(groups, names, saved, **options)
    return groups, report


def test_stored_groups_are_plain_and_are_restored_exactly(tmp_path: Path) -> None:
    assert SAVED == {"groups": [DECAY, PLAIN], "names": [["a", "b"], ["c"]]}
    save({"groups": SAVED}, tmp_path / "x")
    now = groups_to_saved([{"lr": 5.0}], [["c", "new"]])
    assert load({"groups": now}, tmp_path / "x").state["groups"] == SAVED


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([["a", "b"], ["c"]], [DECAY, PLAIN]),
        ([["c"], ["b", "a"]], [PLAIN, DECAY]),
        ([["a"], ["c"], ["b"]], [DECAY, PLAIN, DECAY]),
        ([["b"], []], [DECAY, {}]),
    ],
    ids=["as saved", "reordered", "split", "gone and empty"],
)
def test_values_follow_the_parameters(names: list[list[str]], expected: list[dict[str, Any]]) -> None:
    groups, report = applied([fresh() for _ in names], names)
    assert groups == [fresh(**values) for values in expected]
    assert report.regrouped == ()


def test_entries_on_one_side_only_are_kept_and_reported() -> None:
    groups, report = applied([fresh(decoupled_weight_decay=True), fresh(lr=5.0)], [["a", "new"], ["newer"]])
    assert (report.new, report.gone) == (("new", "newer"), ("b", "c"))
    assert groups == [fresh(**DECAY, decoupled_weight_decay=True), fresh(lr=5.0)]
    assert report.kept[0] == ("decoupled_weight_decay",)  # a field of a newer torch


def test_joined_groups_that_disagree_are_refused_or_resolved() -> None:
    groups = [fresh()]
    both = [["b", "c"]]
    with pytest.raises(GroupMismatchError, match=r"'lr': parameter b was saved with 0.1, parameter c with 0.2"):
        apply_saved_groups(groups, both, SAVED)
    assert groups == [fresh()]
    for on_conflict, lr in (("saved", 0.1), ("current", 9.0)):
        groups, report = applied([fresh()], both, on_conflict=on_conflict)
        assert (groups[0]["lr"], groups[0]["betas"], report.regrouped) == (lr, (0.9, 0.95), (0,))
    groups, _ = applied([fresh()], both, override={"lr": 0.5, "weight_decay": 0.1})  # as the error says
    assert groups == [fresh(lr=0.5, betas=(0.9, 0.95), weight_decay=0.1)]


def test_a_saved_nan_is_refused_by_its_field() -> None:
    """It was reported as a conflict of one parameter with itself, and loaded with on_conflict="saved"."""
    for value in (float("nan"), torch.tensor(float("nan"))):
        saved = groups_to_saved([{**DECAY, "lr": value, "params": [1]}], [["a"]])
        for on_conflict in ("error", "saved"):
            groups = [fresh()]
            with pytest.raises(GroupMismatchError, match=r"'lr': parameter a was saved with nan, .*override=\{'lr'"):
                apply_saved_groups(groups, [["a"]], saved, on_conflict=on_conflict)  # type: ignore[arg-type]
            assert groups == [fresh()]
        assert applied([fresh()], [["a"]], saved, override={"lr": 0.5})[0] == [fresh(**{**DECAY, "lr": 0.5})]


MISSPELT: list[tuple[Any, str]] = [
    ({"override": {"lrr": 0.5, "bet": 1}}, "of bet, lrr: no group has this field; fields are betas, lr, weight_decay"),
    ({"on_conflict": "mine"}, "on_conflict='mine'; allowed: error, saved, current"),
]


def test_wrong_options_and_names_are_refused_before_a_change() -> None:
    groups = [fresh()]
    for option, message in MISSPELT:
        with pytest.raises(ValueError, match=message):
            apply_saved_groups(groups, [["a"]], SAVED, **option)
    assert groups == [fresh()]
    with pytest.raises(GroupMismatchError, match="parameter a is in groups 0 and 1"):
        groups_to_saved([{}, {}], [["a"], ["a"]])
    with pytest.raises(GroupMismatchError, match=r"2 groups, but 1 list\(s\) of names"):
        groups_to_saved([{}, {}], [["a"]])


def test_a_loaded_lr_keeps_the_groups_kind_tensor_or_number() -> None:
    lr = torch.tensor(9.0)
    groups, _ = applied([fresh(lr=lr)], [["a"]])
    assert groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.1, rel=1e-7)  # rounded to float32
    groups, _ = applied([fresh()], [["a"]], groups_to_saved([{"lr": torch.tensor(0.25)}], [["a"]]))
    assert (groups[0]["lr"], type(groups[0]["lr"])) == (0.25, float)
