"""Overrides of parameter groups: keys that do not depend on the order of writing, and unions that must agree."""

from typing import Any

import pytest

from opt_scheduler import (
    ParamGroupOverride,
    ScheduleError,
    combine_param_group_overrides,
    param_group_override_to_tuple,
)


def test_the_order_of_writing_does_not_matter() -> None:
    keys = {"max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "optimizer"}
    assert ParamGroupOverride.__annotations__.keys() == keys
    one = ParamGroupOverride(max_lr=0.01, min_lr=0.001, wd_mult=1.0)
    other = ParamGroupOverride(wd_mult=1.0, min_lr=0.001, max_lr=0.01)
    expected = (("max_lr", 0.01), ("min_lr", 0.001), ("wd_mult", 1.0))
    assert param_group_override_to_tuple(one) == param_group_override_to_tuple(other) == expected
    assert combine_param_group_overrides([one, other]) == one


def test_none_stays_none_and_counts_as_empty() -> None:
    assert param_group_override_to_tuple(None) is None
    assert param_group_override_to_tuple({}) == ()
    assert combine_param_group_overrides([]) == combine_param_group_overrides([None, {}]) == {}


def test_a_conflict_names_the_key_and_both_values() -> None:
    with pytest.raises(ScheduleError) as caught:
        combine_param_group_overrides([{"max_lr": 0.1}, {"min_lr": 0.0}, {"max_lr": 0.2}])
    assert str(caught.value).startswith("parameter group override 'max_lr' is set twice, to 0.1 and to 0.2: ")


@pytest.mark.parametrize(
    ("value", "hashable"),
    [
        ([0.9, 0.95], (0.9, 0.95)),
        ({"b": [1], "a": {2}}, (("a", (2,)), ("b", (1,)))),
        ((1, [2, (3,)]), (1, (2, (3,)))),
        (None, None),
    ],
    ids=["list", "dict", "nested", "none"],
)
def test_values_that_cannot_be_hashed_get_a_form_that_can(value: Any, hashable: Any) -> None:
    override: Any = {"betas": value}
    key = param_group_override_to_tuple(override)
    assert key == (("betas", hashable),)
    assert {key: 1}[key] == 1
    assert combine_param_group_overrides([override, override]) == override


def test_a_value_without_any_hashable_form_is_refused() -> None:
    override: Any = {"betas": type("Array", (), {"__hash__": None})()}
    with pytest.raises(ScheduleError, match=r"override 'betas' is .* \(Array\), which cannot be part of a key"):
        param_group_override_to_tuple(override)
