"""Any in the state of a `FieldScheduler`: a changed one is reported when the run is resumed."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from opt_scheduler import FieldSchedule, FieldScheduler, ScheduleError, cosine, cut, linear, warmup


def scheduler(schedules: Any, *, relative: bool = False) -> FieldScheduler:
    groups = [{"lr": 1.0, "weight_decay": 0.0, "name": "a"}]
    return FieldScheduler(SimpleNamespace(param_groups=groups), schedules, relative=relative)


def saved(schedules: Any, *, at: float = 50, relative: bool = False) -> dict[str, Any]:
    run = scheduler(schedules, relative=relative)
    run.step(at)
    state: dict[str, Any] = json.loads(json.dumps(run.state_dict()))
    return state


def head_only(schedule: Any) -> list[FieldSchedule]:
    return [FieldSchedule(field="lr", schedule=schedule, where={"name": "a"})]


HUNDRED = cosine(1.0, 0.0, steps=100)
CHANGED: dict[str, tuple[Any, Any, str]] = {
    "a-horizon": (
        HUNDRED,
        cosine(1.0, 0.0, steps=200),
        "lr: its schedule changed; at step 50 it is 0.853553 here and 0.5",
    ),
    "a-curve": (HUNDRED, linear(1.0, 0.0, steps=100), "lr: its schedule changed; at step 50 it is 0.5 here and 0.5 in"),
    "a-field-more": (HUNDRED, {"lr": HUNDRED, "weight_decay": 0.1}, "weight_decay has a schedule here and had none"),
    "a-field-less": ({"lr": HUNDRED, "weight_decay": 0.1}, HUNDRED, "weight_decay had a schedule in the checkpoint"),
    "other-groups": (head_only(HUNDRED), HUNDRED, "lr has a schedule here and had none in the checkpoint"),
    "a-lambda": (
        lambda step: 1.0,
        lambda step: 1.0 - step / 100,
        "lr: its callable gives 0.88 at step 12 here, and gave 1",
    ),
    "a-lambda-inside": (
        warmup(lambda step: 1.0, steps=10),
        warmup(lambda step: 1.0 - step / 100, steps=10),
        "lr: its callable gives 0.98 at step 12 here, and gave 1 in the saved run",
    ),
    "a-curve-for-a-lambda": (lambda step: 1.0, HUNDRED, "lr: its schedule changed; here it is {"),
    "a-lambda-for-a-curve": (HUNDRED, lambda step: 1.0, "lr: its schedule changed; at step 50 it is 1 here"),
}


def test_a_change_from_absolute_to_relative_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    scheduler(HUNDRED, relative=True).load_state_dict(saved(HUNDRED))
    assert "lr: relative=True here, and False in the checkpoint" in caplog.text


@pytest.mark.parametrize(("before", "now", "message"), CHANGED.values(), ids=CHANGED)
def test_a_changed_schedule_is_reported(before: Any, now: Any, message: str, caplog: pytest.LogCaptureFixture) -> None:
    # A run resumed with another schedule went on with it in silence.
    resumed = scheduler(now)
    resumed.load_state_dict(saved(before))
    assert (resumed.num_steps, resumed.schedules) == (50, scheduler(now).schedules)
    record = caplog.records[0]
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"FieldScheduler, resumed at step 50: {message}")


def half(step: float) -> float:
    """A function of one name and one value."""
    return 0.5


@pytest.mark.parametrize(
    "same",
    [HUNDRED, {"lr": half}, head_only(HUNDRED), {"lr": cut(half, 10), "weight_decay": 0.1}, {"betas[0]": HUNDRED}],
    ids=["curve", "callable", "groups", "composed", "item"],
)
def test_the_same_schedules_are_not_reported(same: Any, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> FieldScheduler:
        groups = [{"lr": 1.0, "weight_decay": 0.0, "name": "a", "betas": (0.9, 0.99)}]
        return FieldScheduler(SimpleNamespace(param_groups=groups), same)

    first = build()
    first.step(7)
    for state in (first.state_dict(), json.loads(json.dumps(first.state_dict()))):
        build().load_state_dict(state)
    assert not caplog.records


def test_a_state_from_before_schedules_were_saved_loads(caplog: pytest.LogCaptureFixture) -> None:
    resumed = scheduler(HUNDRED)
    resumed.load_state_dict({"version": 1, "num_steps": 50})
    assert resumed.get_last_lr() == [HUNDRED(50)]
    assert not caplog.records


def test_a_save_does_not_fail_where_a_callable_is_not_defined(caplog: pytest.LogCaptureFixture) -> None:
    # Steps in samples: the run visits multiples of 256 only.
    def build(table: dict[float, float]) -> FieldScheduler:
        return scheduler({"lr": lambda step: table[step]})

    run = build({0: 1.0, 256: 0.5, 512: 0.25, 768: 0.125})
    for _ in range(3):
        run.step(256)
    state = run.state_dict()
    assert state["schedules"][0]["values"] == [[0, 1.0], [768, 0.125]]
    build({0: 1.0, 768: 0.125}).load_state_dict(state)
    assert not caplog.records
    build({0: 2.0, 768: 0.125}).load_state_dict(state)
    assert "lr: its callable gives 2 at step 0 here, and gave 1 in the saved run" in caplog.text


def test_the_state_is_plain_whatever_chooses_the_groups(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> FieldScheduler:
        target = SimpleNamespace(param_groups=[{"lr": 1.0, "kind": complex(1, 2), "shape": (1, 2)}])
        where = {"kind": complex(1, 2), "shape": (1, 2)}
        return FieldScheduler(target, [FieldSchedule(field="lr", schedule=HUNDRED, where=where)])

    state = json.loads(json.dumps(build().state_dict()))
    build().load_state_dict(state)
    assert not caplog.records


def test_a_callable_that_fails_at_the_saved_step_changes_nothing() -> None:
    resumed = scheduler({"lr": lambda step: 1.0 if step < 5 else float("nan")}, relative=True)
    before = dict(resumed.param_groups[0])
    with pytest.raises(ScheduleError, match="returned nan"):
        resumed.load_state_dict(saved(HUNDRED, relative=True))
    assert (resumed.num_steps, resumed.param_groups) == (0, [before])
