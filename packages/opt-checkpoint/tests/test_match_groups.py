"""Parameter groups by name: reordered, split, joined, changed; and Megatron-Core's identity tuple."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from opt_checkpoint import (
    GroupMismatchError,
    apply_saved_groups,
    groups_to_saved,
    load,
    save,
)

DECAY = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.01}
PLAIN = {"lr": 0.2, "betas": (0.9, 0.95), "weight_decay": 0.0}
SAVED = groups_to_saved([{**DECAY, "params": [1, 2]}, {**PLAIN, "params": [3]}], [["a", "b"], ["c"]])


def fresh(**changes: Any) -> dict[str, Any]:
    return {"params": ["untouched"], "lr": 9.0, "betas": (0.0, 0.0), "weight_decay": 9.0, **changes}


def test_stored_groups_are_plain_and_by_name() -> None:
    assert SAVED == {"groups": [DECAY, PLAIN], "names": [["a", "b"], ["c"]]}


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
    groups = [fresh() for _ in names]
    apply_saved_groups(groups, names, SAVED)
    for group, values in zip(groups, expected):
        assert group == fresh(**values)


def test_added_and_removed_parameters_are_reported() -> None:
    groups = [fresh(), fresh(lr=5.0)]
    report = apply_saved_groups(groups, [["a", "new"], ["newer"]], SAVED)
    assert (report.new, report.gone) == (("new", "newer"), ("b", "c"))
    assert groups[0]["lr"] == 0.1
    assert groups[1]["lr"] == 5.0


def test_groups_that_are_joined_and_disagree_are_refused_and_left_alone() -> None:
    groups = [fresh()]
    with pytest.raises(GroupMismatchError, match=r"'lr': parameter b was saved with 0.1, parameter c with 0.2"):
        apply_saved_groups(groups, [["b", "c"]], SAVED)
    assert groups == [fresh()]


@pytest.mark.parametrize(("on_conflict", "lr"), [("saved", 0.1), ("current", 9.0)])
def test_a_conflict_is_resolved_as_requested(on_conflict: Any, lr: float) -> None:
    groups = [fresh()]
    report = apply_saved_groups(groups, [["b", "c"]], SAVED, on_conflict=on_conflict)
    assert (groups[0]["lr"], groups[0]["betas"]) == (lr, (0.9, 0.95))
    assert report.regrouped == (0,)
    groups = [fresh()]
    apply_saved_groups(groups, [["b", "c"]], SAVED, override={"lr": 0.5, "weight_decay": 0.1})  # as the error says
    assert groups == [fresh(lr=0.5, betas=(0.9, 0.95), weight_decay=0.1)]


@pytest.mark.parametrize("value", [float("nan"), torch.tensor(float("nan"))], ids=["number", "tensor"])
def test_a_saved_nan_is_refused_by_its_field(value: Any) -> None:
    """It was reported as a conflict of one parameter with itself, and loaded with on_conflict="saved"."""
    saved = groups_to_saved([{**DECAY, "lr": value, "params": [1]}], [["a"]])
    for on_conflict in ("error", "saved"):
        groups = [fresh()]
        with pytest.raises(GroupMismatchError, match=r"'lr': parameter a was saved with nan, .*override=\{'lr'"):
            apply_saved_groups(groups, [["a"]], saved, on_conflict=on_conflict)
        assert groups == [fresh()]
    apply_saved_groups(groups, [["a"]], saved, override={"lr": 0.5})
    assert groups == [fresh(**{**DECAY, "lr": 0.5})]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            {"override": {"lrr": 0.5, "bet": 1}},
            "override of bet, lrr: no group has this field; fields are betas, lr, weight_decay",
        ),
        ({"on_conflict": "mine"}, "on_conflict='mine'; allowed: error, saved, current"),
    ],
    ids=["override", "on_conflict"],
)
def test_a_misspelt_option_is_refused_before_anything_is_set(option: Any, message: str) -> None:
    groups = [fresh()]
    with pytest.raises(ValueError, match=message):
        apply_saved_groups(groups, [["a"]], SAVED, **option)
    assert groups == [fresh()]


def test_a_field_of_a_newer_torch_keeps_its_value_and_is_reported() -> None:
    groups = [fresh(decoupled_weight_decay=True)]
    report = apply_saved_groups(groups, [["a"]], SAVED)
    assert groups[0]["decoupled_weight_decay"] is True
    assert report.kept == {0: ("decoupled_weight_decay",)}


def test_a_tensor_lr_keeps_its_tensor_and_a_stored_one_becomes_a_number_where_a_number_was() -> None:
    lr = torch.tensor(9.0)
    groups = [fresh(lr=lr)]
    apply_saved_groups(groups, [["a"]], SAVED)
    assert groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.1, rel=1e-7)  # rounded to float32
    groups = [fresh()]
    apply_saved_groups(groups, [["a"]], groups_to_saved([{"lr": torch.tensor(0.25)}], [["a"]]))
    assert (groups[0]["lr"], type(groups[0]["lr"])) == (0.25, float)


def test_a_name_in_two_groups_is_refused() -> None:
    with pytest.raises(GroupMismatchError, match="parameter a is in groups 0 and 1"):
        groups_to_saved([{}, {}], [["a"], ["a"]])
    with pytest.raises(GroupMismatchError, match=r"2 groups, but 1 list\(s\) of names"):
        groups_to_saved([{}, {}], [["a"]])


def test_groups_in_a_state_come_back_as_they_were_saved_whatever_they_are_now(tmp_path: Path) -> None:
    save({"groups": SAVED}, tmp_path / "x")
    now = groups_to_saved([{"lr": 5.0}], [["c", "new"]])
    assert load({"groups": now}, tmp_path / "x").state["groups"] == SAVED
