"""`FieldScheduler`: absolute and relative schedules, and what it says about groups that it would make equal."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from opt_scheduler import FieldSchedule, FieldScheduler, ScheduleError, linear

HALVING = linear(1.0, 0.0, steps=4)


def optimizer(*groups: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(param_groups=list(groups))


def test_a_relative_schedule_multiplies_each_group_s_own_value() -> None:
    # An absolute schedule gave a layer-wise decay of 1e-3, 1e-2 one value for both.
    target = optimizer({"lr": 1e-3, "betas": (0.8, 0.9)}, {"lr": 1e-2, "betas": (0.4, 0.9)})
    scheduler = FieldScheduler(target, {"lr": HALVING, "betas[0]": HALVING}, relative=True)
    scheduler.step(2)
    assert [group["lr"] for group in target.param_groups] == [5e-4, 5e-3]
    assert [group["betas"] for group in target.param_groups] == [(0.4, 0.9), (0.2, 0.9)]
    assert scheduler.base_lrs == [1e-3, 1e-2]
    scheduler.seek(0)
    assert [group["lr"] for group in target.param_groups] == [1e-3, 1e-2]


def test_only_the_schedules_marked_relative_are() -> None:
    target = optimizer({"name": "head", "lr": 0.5}, {"name": "body", "lr": 0.25})
    FieldScheduler(
        target,
        [
            FieldSchedule(field="lr", schedule=HALVING, where={"name": "head"}, relative=True),
            FieldSchedule(field="lr", schedule=HALVING, where={"name": "body"}),
        ],
    ).step(1)
    assert [group["lr"] for group in target.param_groups] == [0.375, 0.75]


def test_a_relative_schedule_resumes_in_either_loading_order() -> None:
    target = optimizer({"lr": 1e-3}, {"lr": 1e-2})
    scheduler = FieldScheduler(target, {"lr": HALVING}, relative=True)
    scheduler.step(1)
    saved_groups, saved = json.loads(json.dumps([target.param_groups, scheduler.state_dict()]))
    scheduler.step(1)
    expected = [group["lr"] for group in target.param_groups]

    groups_last = optimizer({"lr": 1e-3}, {"lr": 1e-2})
    # This optimizer was saved without `initial_lr`, so its groups alone would make 7.5e-4 the base.
    bare = optimizer({"lr": 7.5e-4}, {"lr": 7.5e-3})
    for resumed in (groups_last, bare):
        scheduler = FieldScheduler(resumed, {"lr": HALVING}, relative=True)
        scheduler.load_state_dict(saved)
        if resumed is groups_last:
            resumed.param_groups = [dict(group) for group in saved_groups]
        scheduler.step(1)
        assert [group["lr"] for group in resumed.param_groups] == expected


def test_other_groups_and_a_group_without_a_value_are_refused() -> None:
    state = FieldScheduler(optimizer({"lr": 1.0}, {"lr": 1.0}), {"lr": HALVING}, relative=True).state_dict()
    other = FieldScheduler(optimizer({"lr": 1.0}), {"lr": HALVING}, relative=True)
    with pytest.raises(ScheduleError, match="the state has 2 groups and the optimizer 1"):
        other.load_state_dict(state)
    with pytest.raises(ScheduleError, match="group 0: relative=True needs a 'lr' to multiply"):
        FieldScheduler(optimizer({"lr": None}), {"lr": HALVING}, relative=True)
    for given in (iter([]), [SimpleNamespace()]):  # the first is as model.parameters()
        with pytest.raises(ScheduleError, match=r"has no param_groups; pass an optimizer such as torch\.optim\.AdamW"):
            FieldScheduler(given, HALVING)


@pytest.mark.parametrize(("rates", "relative"), [((1e-3, 1e-2), False), ((1e-3, 1e-2), True), ((1e-3, 1e-3), False)])
def test_replacing_different_values_by_one_is_logged(
    rates: tuple[float, ...], relative: bool, caplog: pytest.LogCaptureFixture
) -> None:
    FieldScheduler(optimizer(*({"lr": lr} for lr in rates)), {"lr": HALVING}, relative=relative)
    expected = [] if relative or rates[0] == rates[1] else [("WARNING", True)]
    assert [(record.levelname, "0.001, 0.01" in record.getMessage()) for record in caplog.records] == expected


@pytest.mark.parametrize(("relative", "expected"), [(False, 0.75), (True, 0.375)])
def test_a_group_added_later_and_a_value_edited_by_hand_count(relative: bool, expected: float) -> None:
    target = optimizer({"lr": 1.0})
    scheduler = FieldScheduler(target, {"lr": HALVING}, relative=relative)
    target.param_groups.append({"lr": 0.5})
    target.param_groups[0]["lr"] = 7.0
    scheduler.step(1)
    assert [group["lr"] for group in target.param_groups] == [0.75, expected]


@pytest.mark.parametrize("relative", [False, True])
def test_lr_scale_multiplies_the_learning_rate_only(relative: bool) -> None:
    # timm, MAE and BEiT leave lr alone and store the layer's factor for the scheduler: it was ignored.
    scales: list[dict[str, float]] = [{"lr_scale": 0.25}, {"lr_scale": 1.0}, {}]
    target = optimizer(*({"lr": 0.5, "weight_decay": 0.5, **scale} for scale in scales))
    scheduler = FieldScheduler(target, {"lr": HALVING, "weight_decay": HALVING}, relative=relative)
    base = 0.5 if relative else 1.0
    assert scheduler.base_lrs == [base, base, base]
    for step, left in ((0, 1.0), (2, 0.5), (1, 0.75)):
        scheduler.seek(step)
        assert scheduler.get_last_lr() == [left * base / 4, left * base, left * base]
        assert [group["weight_decay"] for group in target.param_groups] == [left * base] * 3
    assert [group["lr_scale"] for group in target.param_groups[:2]] == [0.25, 1.0]


NAMED = {"name": "body", "lr": 1.0, "betas": (0.9, 0.99)}
REFUSED: list[tuple[Any, str]] = [
    ([FieldSchedule(field="lr", schedule=HALVING, where={"name": "head"})], "'lr': no group matches where={'name': 'h"),
    ([FieldSchedule(field="lr", schedule=HALVING)] * 2, "group 0 has two for 'lr'; make their where disjoint"),
    ({"betas[0]": HALVING, "betas": HALVING}, "group 0 has two for 'betas'; make their where disjoint"),
    ({"momentum": 0.9}, r"group 0 has no 'momentum' to schedule; it has \['betas', 'lr', 'name'\]"),
    ({"betas[2]": 0.9}, r"group 0 has no 'betas\[2\]': its 'betas' is \(0.9, 0.99\)"),
    ("cosine", "must be a schedule, a dict of schedules by field"),
    (None, "must be a schedule, a dict of schedules by field"),
    ({"kind": "ramp"}, "must be a Schedule, a number"),
    ([HALVING], "must be a schedule, a dict of schedules by field"),
    ([], "schedules is empty"),
]


@pytest.mark.parametrize(("schedules", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_schedules_that_do_not_fit_the_groups_are_refused(schedules: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        FieldScheduler(optimizer(dict(NAMED)), schedules)


@pytest.mark.parametrize("scale", ["0.5", -1.0, float("nan"), [1.0]])
def test_an_lr_scale_that_is_no_factor_is_refused(scale: Any) -> None:
    target = optimizer({"lr": 1.0}, {"lr": 1.0, "lr_scale": scale})
    with pytest.raises(ScheduleError, match=r"FieldScheduler: group 1: lr_scale=.* must be a number of at least 0"):
        FieldScheduler(target, HALVING)
    assert target.param_groups[0] == {"lr": 1.0}


@pytest.mark.parametrize("field", ["", "betas[", "betas[x]", "betas[0", "0lr"])
def test_a_field_must_be_a_name_or_a_name_with_an_index(field: str) -> None:
    with pytest.raises(ScheduleError, match="must be a key of the groups"):
        FieldSchedule(field=field, schedule=HALVING)
