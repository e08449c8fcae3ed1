"""Saving and loading: the step is set, not added; all or nothing; and the two flags choose what they say."""

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opt_scheduler import FieldScheduler, OptimizerParamScheduler, ScheduleError, linear, piecewise_linear

BASE: dict[str, Any] = {
    "init_lr": 0.0,
    "max_lr": 1.0,
    "min_lr": 0.1,
    "lr_warmup_steps": 10,
    "lr_decay_steps": 110,
    "lr_decay_style": "linear",
    "start_wd": 0.0,
    "end_wd": 0.2,
    "wd_incr_steps": 100,
    "wd_incr_style": "linear",
}
WSD: dict[str, Any] = {"lr_decay_style": "WSD", "wsd_decay_steps": 20, "lr_wsd_decay_style": "exponential"}
TAKE = {"use_checkpoint_opt_param_scheduler": True, "override_opt_param_scheduler": False}
KEEP = {"use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": True}
AGREE = {"use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": False}


def build(*groups: dict[str, Any], **arguments: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(SimpleNamespace(param_groups=list(groups) or [{}]), **BASE | arguments)


def saved(step: float = 50, **arguments: Any) -> dict[str, Any]:
    scheduler = build(**arguments)
    scheduler.step(step)
    state: dict[str, Any] = json.loads(json.dumps(scheduler.state_dict()))  # what a checkpoint keeps of it
    return state


def everything(scheduler: OptimizerParamScheduler) -> dict[str, Any]:
    return copy.deepcopy({"state": scheduler.state_dict(), "groups": scheduler.param_groups})


MEGATRON_KEYS = (
    "max_lr",
    "lr_warmup_steps",
    "num_steps",
    "lr_decay_style",
    "lr_decay_steps",
    "min_lr",
    "start_wd",
    "end_wd",
    "wd_incr_style",
    "wd_incr_steps",
)


def test_the_state_has_megatron_cores_keys_and_those_it_omits() -> None:
    assert saved().keys() == {
        *MEGATRON_KEYS,
        "init_lr",
        "wsd_decay_steps",
        "lr_wsd_decay_style",
        "warmup_first",
        "version",
    }


def test_loading_writes_the_groups_and_is_idempotent() -> None:
    # Megatron-Core adds: 50 becomes 100, and into a scheduler already at 7 it becomes 57. It also writes the groups
    # before it has restored the fields, so that the first update after a resume has another weight decay.
    scheduler = build(end_wd=1.0)
    scheduler.step(7)
    scheduler.load_state_dict(saved(50))
    assert scheduler.param_groups[0]["weight_decay"] == pytest.approx(0.1)
    once = everything(scheduler)
    scheduler.load_state_dict(saved(50))
    assert scheduler.num_steps == 50
    assert everything(scheduler) == once


def test_a_wsd_run_goes_on_as_it_was() -> None:
    # Megatron-Core does not save the anneal, so the arguments of the resuming run decide it.
    scheduler = build(**WSD | {"wsd_decay_steps": 80, "lr_wsd_decay_style": "linear"})
    scheduler.load_state_dict(saved(100, **WSD))
    assert scheduler.get_lr() == build(**WSD).lr_at(100)
    cosine = build(lr_decay_style="cosine")
    cosine.load_state_dict(saved(100, **WSD))
    assert cosine.get_lr() == build(**WSD).lr_at(100)


@given(
    step=st.integers(0, 300),
    more=st.integers(0, 200),
    style=st.sampled_from(["constant", "linear", "cosine", "inverse-square-root", "WSD"]),
    first=st.sampled_from(["init", "one", 3.0]),
)
@settings(max_examples=60, deadline=None)
def test_a_run_resumed_anywhere_equals_one_never_stopped(step: int, more: int, style: str, first: Any) -> None:
    arguments = WSD | {"lr_decay_style": style, "warmup_first": first}
    unbroken = build(**arguments)
    unbroken.step(step + more)
    resumed = build(**arguments)
    resumed.load_state_dict(saved(step, **arguments))
    resumed.step(more)
    assert everything(resumed) == everything(unbroken)


OTHER: dict[str, Any] = {"max_lr": 2.0, "lr_decay_steps": 210, "init_lr": 0.5}
# How the scheduler and the saved one were built, and what the loaded state has of its own.
FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "take": (OTHER | TAKE, {}, {}),
    "keep": (OTHER | KEEP, {}, OTHER),
    "keep some": (OTHER | {"override_opt_param_scheduler": ["lr_decay_steps"]}, {}, {"lr_decay_steps": 210}),
    "keep what was given": ({"min_lr": None} | KEEP, WSD | {"lr_decay_style": "linear"}, {}),
    "agree": (AGREE, {}, {}),
}


@pytest.mark.parametrize(("given", "before", "own"), FLAGS.values(), ids=FLAGS)
def test_flags_choose_between_saved_and_given_settings(
    given: dict[str, Any], before: dict[str, Any], own: dict[str, Any]
) -> None:
    scheduler = build(**given)
    scheduler.load_state_dict(saved(**before))
    assert scheduler.state_dict() == saved(**before) | own


def test_what_was_assigned_counts_as_given() -> None:
    scheduler = build(**KEEP, min_lr=None)
    scheduler.min_lr = 0.3
    scheduler.load_state_dict(saved())
    assert scheduler.min_lr == 0.3


def test_without_a_flag_a_difference_is_refused() -> None:
    with pytest.raises(ScheduleError, match="lr_decay_steps is 220 here and 110 in the checkpoint; set use_checkp"):
        build(lr_decay_steps=220, **AGREE).load_state_dict(saved())


class TestGroupsOnLoad:
    """Groups carry copies of max_lr and min_lr, and these come back with the optimizer's own checkpoint."""

    def test_copies_follow_and_overrides_stay(self) -> None:
        copied = {"max_lr": 1.0, "min_lr": 0.1}
        own = {"max_lr": 0.3, "min_lr": 0.1}
        partly: dict[str, Any] = {"max_lr": 0.7}
        plain: dict[str, Any] = {}
        scheduler = build(copied, own, partly, plain, max_lr=2.0, min_lr=0.2, **KEEP)
        scheduler.load_state_dict(saved(10))
        assert (copied["max_lr"], copied["min_lr"]) == (2.0, 0.2)
        assert (copied["lr"], plain["lr"]) == (2.0, 2.0)
        assert (own["max_lr"], own["min_lr"], own["lr"]) == (0.3, 0.1, 0.3)
        assert (partly["max_lr"], partly["lr"]) == (0.7, 0.7)

    def test_copies_of_the_new_values_follow_to_the_checkpoint_s(self) -> None:
        copied = {"max_lr": 2.0, "min_lr": 0.2}
        scheduler = build(copied, max_lr=2.0, min_lr=0.2, **TAKE)
        scheduler.load_state_dict(saved(10))
        assert copied == {"max_lr": 1.0, "min_lr": 0.1, "lr": 1.0, "weight_decay": pytest.approx(0.02)}


STATE = saved()
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {key: value for key, value in STATE.items() if key not in ("max_lr", "num_steps")},
        "OptimizerParamScheduler: state: 2 problems\n  - max_lr is missing (keys: start_lr, max_lr)\n"
        "  - num_steps is missing (keys: num_iters, num_steps)",
    ),
    (STATE | {"version": 2}, "OptimizerParamScheduler: version=2 of the state is newer than 1, the last"),
    (STATE | {"num_steps": -1}, "OptimizerParamScheduler: state: num_steps=-1 must be a number"),
    (STATE | {"lr_warmup_steps": 500}, "OptimizerParamScheduler: lr_warmup_steps=500 must be less tha"),
    (STATE | {"min_lr": 0.6}, "group 0 with {'max_lr': 0.5}: max_lr=0.5 must be at least"),
]


@pytest.mark.parametrize(("state", "message"), REFUSED, ids=["missing", "newer", "negative", "impossible", "group"])
def test_a_refused_state_changes_nothing(state: dict[str, Any], message: str) -> None:
    scheduler = build({"max_lr": 0.5})
    scheduler.step(3)
    before = everything(scheduler)
    with pytest.raises(ScheduleError) as caught:
        scheduler.load_state_dict(state)
    assert str(caught.value).startswith(message)
    assert everything(scheduler) == before


# What checkpoints of Megatron-Core hold, by age.
AGES: dict[str, dict[str, Any]] = {
    "today": {key: STATE[key] for key in MEGATRON_KEYS},
    "without-weight-decay": {
        "max_lr": 1.0,
        "warmup_steps": 10,
        "num_steps": 50,
        "decay_style": "linear",
        "decay_steps": 110,
        "min_lr": 0.1,
    },
    "in-iterations": {
        "start_lr": 1.0,
        "warmup_iter": 10,
        "num_iters": 50,
        "decay_style": "linear",
        "end_iter": 110,
        "min_lr": 0.1,
    },
}


@pytest.mark.parametrize("container", [None, "opt_param_scheduler", "lr_scheduler"])
@pytest.mark.parametrize("age", AGES)
def test_a_checkpoint_of_megatron_core_is_understood(age: str, container: str | None) -> None:
    state = AGES[age] if container is None else {container: AGES[age], "iteration": 50}
    scheduler = build(max_lr=5.0, min_lr=0.0, lr_warmup_steps=1, lr_decay_steps=2, lr_decay_style="cosine")
    scheduler.load_state_dict(state)
    assert scheduler.state_dict() == STATE


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, r"FieldScheduler: the state lacks \['num_steps'\]; it has \[\]"),
        ({"num_steps": 1, "version": 9}, "FieldScheduler: version=9 of the state is newer than 1"),
        ({"num_steps": -1}, "FieldScheduler: num_steps=-1 must be at least 0"),
    ],
    ids=["empty", "newer", "negative"],
)
def test_a_field_scheduler_sets_the_step_and_refuses_a_bad_state(state: dict[str, Any], message: str) -> None:
    schedules = {"lr": linear(1.0, 0.0, steps=10), "momentum": piecewise_linear((0, 0.8), (10, 0.9))}
    first, resumed = (
        FieldScheduler(SimpleNamespace(param_groups=[{"lr": 0.0, "momentum": 0.0}]), schedules) for _ in range(2)
    )
    first.step(5)
    assert first.param_groups == [{"lr": 0.5, "momentum": pytest.approx(0.85)}]
    assert (first.base_lrs, first.get_last_lr()) == ([1.0], [0.5])
    for _ in range(2):
        resumed.load_state_dict(first.state_dict())
    with pytest.raises(ScheduleError, match=message):
        resumed.load_state_dict(state)
    assert (resumed.num_steps, resumed.param_groups) == (5, first.param_groups)


def test_a_horizon_replaced_by_the_checkpoint_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    # A run meant to be lengthened to 220 steps ended its decay at 110, and nothing said so.
    build().load_state_dict(saved(50))
    assert not caplog.records
    scheduler = build(lr_decay_steps=220)
    scheduler.load_state_dict(saved(50))
    assert scheduler.lr_decay_steps == 110
    with caplog.at_level("INFO", logger="opt_scheduler"):
        build(lr_decay_steps=220, **KEEP).load_state_dict(saved(50))
    (warned, on_purpose) = caplog.records
    assert warned.levelname == "WARNING"
    assert warned.getMessage().startswith("lr_decay_steps=110 of the checkpoint replaces 220")
    assert on_purpose.levelname == "INFO"
    assert on_purpose.getMessage() == (
        "lr_decay_steps=220, given when the scheduler was built, replaces the checkpoint's 110"
    )
