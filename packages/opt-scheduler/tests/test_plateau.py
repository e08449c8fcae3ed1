"""`Plateau`: what it takes for an improvement, what it writes, and that a resumed run goes on as it was."""

import inspect
import json
import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from opt_scheduler import FieldSchedule, FieldScheduler, OptimizerParamScheduler, Plateau, ScheduleError, linear

FALL = linear(1.0, 0.0, steps=64)


def build(*groups: dict[str, Any], schedules: Any = FALL, **settings: Any) -> Plateau:
    target = SimpleNamespace(param_groups=list(groups) or [{"lr": 0.5}])
    return Plateau(FieldScheduler(target, schedules), **settings)


def test_it_multiplies_the_schedule_and_does_so_at_once() -> None:
    plateau = build(factor=0.5, patience=1)
    plateau.step(16)
    assert [plateau.observe(loss) for loss in (3.0, 3.0, 3.0)] == [False, False, True]
    assert plateau.get_last_lr() == [0.75 * 0.5]
    plateau.step(16)
    assert plateau.get_last_lr() == [0.5 * 0.5]  # of the schedule, not of what was written before
    plateau.seek(0)
    assert plateau.get_last_lr() == [0.5]


@pytest.mark.needs_extra
@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("patience", "cooldown", "factor"), [(0, 0, 0.5), (2, 0, 0.1), (1, 3, 0.5), (3, 2, 0.9)])
def test_it_lowers_when_torch_s_reduce_lr_on_plateau_does(
    mode: Any, patience: int, cooldown: int, factor: float
) -> None:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode=mode, factor=factor, patience=patience, cooldown=cooldown, threshold=0.01, eps=0.0
    )
    ours = build(
        schedules=0.5,
        factor=factor,
        mode=mode,
        patience=patience,
        cooldown=cooldown,
        threshold=0.01,
    )
    rates = random.Random(patience)
    for i in range(200):
        metric = math.nan if i % 17 == 3 else round(rates.uniform(0.5, 1.5), 2)
        theirs.step(metric)
        ours.observe(metric)
        # torch multiplies the learning rate again and again, ours its factor.
        assert ours.get_last_lr()[0] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
    assert ours.scale < factor**3


def test_an_infinite_metric_is_not_the_best() -> None:
    """After one, nothing improved, and its state could not be loaded."""
    plateau = build(factor=0.5, patience=0)
    assert [plateau.observe(loss) for loss in (math.inf, 3.0, 2.0)] == [True, False, False]
    plateau.load_state_dict(plateau.state_dict())


@pytest.mark.needs_extra
def test_defaults_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    theirs = inspect.signature(torch.optim.lr_scheduler.ReduceLROnPlateau).parameters
    ours = inspect.signature(Plateau).parameters
    for name in ("mode", "factor", "patience", "threshold", "cooldown"):
        assert ours[name].default == theirs[name].default


def test_negative_metrics_must_improve_too_above_a_floor() -> None:
    # With best · (1 - threshold), -10 is an improvement on -10.5 at a threshold of 0.1.
    plateau = build(patience=0, threshold=0.1)
    assert [plateau.observe(metric) for metric in (-10.5, -10.0)] == [False, True]
    plateau = build(factor=0.5, patience=0, min_scale=0.2)
    assert [plateau.observe(1.0) for _ in range(6)] == [False, True, True, True, False, False]
    assert plateau.scale == 0.2


def test_groups_that_the_schedule_does_not_reach_are_left_alone() -> None:
    schedules = [FieldSchedule(field="lr", schedule=FALL, where={"name": "a"})]
    plateau = build({"lr": 1.0, "name": "a"}, {"lr": 3.0, "name": "b"}, schedules=schedules, factor=0.5, patience=0)
    plateau.observe(1.0)
    plateau.observe(1.0)
    assert plateau.get_last_lr() == [FALL(0) / 2, 3.0]


def test_it_wraps_megatron_s_scheduler() -> None:
    target = SimpleNamespace(param_groups=[{}, {"max_lr": 0.5}])
    inside = OptimizerParamScheduler(target, 0.0, 1.0, 0.0, 0, 100, "linear", 0.1, 0.1, 100, "constant")
    plateau = Plateau(inside, factor=0.5, patience=0)
    plateau.step(50)
    plateau.observe(1.0)
    plateau.observe(1.0)
    assert target.param_groups == [
        {"lr": 0.25, "weight_decay": 0.1},
        {"lr": 0.125, "weight_decay": 0.1, "max_lr": 0.5},
    ]


@pytest.mark.parametrize("stop", [0, 1, 7, 19, 33])
def test_a_resumed_run_uses_the_values_of_one_never_stopped(stop: int) -> None:
    metrics = [round(random.Random(i).uniform(0.5, 1.0), 1) for i in range(40)]

    def run(plateau: Plateau, first: int, last: int) -> list[float]:
        used = []
        for metric in metrics[first:last]:
            plateau.step()
            plateau.observe(metric)
            used += plateau.get_last_lr()
        return used

    settings: dict[str, Any] = {"factor": 0.5, "patience": 2, "cooldown": 1}
    unbroken = run(build(**settings), 0, 40)
    first = build(**settings)
    second = build(**settings)
    begun = run(first, 0, stop)
    state = json.loads(json.dumps(first.state_dict(), allow_nan=False))
    for _ in range(2):
        second.load_state_dict(state)
    assert second.get_last_lr() == first.get_last_lr()
    assert begun + run(second, stop, 40) == unbroken
    assert unbroken[-1] < FALL(40) / 4


def test_a_step_of_the_scheduler_inside_is_refused() -> None:
    plateau = build()
    plateau.scheduler.step(3)
    for act in (plateau.step, lambda: plateau.observe(1.0)):
        with pytest.raises(ScheduleError, match="the scheduler inside is at step 3, this one at 0; step only this one"):
            act()
    assert (plateau.best, plateau.num_bad, plateau.scale) == (None, 0, 1.0)


def test_changed_settings_are_reported_at_resume(caplog: pytest.LogCaptureFixture) -> None:
    build(factor=0.5).load_state_dict(build(factor=0.1).state_dict())
    assert "Plateau: factor=0.5 here, and 0.1 in the checkpoint" in caplog.text
    assert len(caplog.records) == 1


STATE = build().state_dict()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"num_steps": 3}, r"the state lacks \['best', 'cooldown_left', 'num_bad', 'scale', 'scheduler'\]"),
        (STATE | {"version": 2}, "version=2 of the state is newer than 1"),
        (STATE | {"scale": -1.0}, "scale=-1.0 must be at least 0"),
        (STATE | {"best": "1.0"}, "best='1.0' must be a finite number"),
        (STATE | {"num_bad": -1}, "num_bad=-1 must be at least 0"),
        (STATE | {"scheduler": {"num_steps": -1}}, "num_steps=-1 must be at least 0"),
    ],
    ids=["another", "newer", "scale", "best", "num_bad", "inside"],
)
def test_a_refused_state_changes_nothing(state: dict[str, Any], message: str) -> None:
    plateau = build(patience=0)
    plateau.step(16)
    plateau.observe(1.0)
    plateau.observe(1.0)
    before = (plateau.state_dict(), plateau.get_last_lr())
    with pytest.raises(ScheduleError, match=message):
        plateau.load_state_dict(state)
    assert (plateau.state_dict(), plateau.get_last_lr()) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factor": 1.0}, "factor=1.0 must be less than 1"),
        ({"factor": 0.0}, "factor=0.0 must be more than 0"),
        ({"patience": -1}, "patience=-1 must be at least 0"),
        ({"mode": "mim"}, "mode='mim' is not known: use one of 'max', 'min'; did you mean 'min'"),
        ({"min_scale": 2.0}, "factor=0.1 must be less than 1, and min_scale=2.0 at most 1"),
        ({"schedules": {"weight_decay": 0.1}}, "the scheduler sets the learning rate of no group"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=f"^Plateau: {message}"):
        build(**settings)


def test_other_schedulers_and_metrics_are_refused() -> None:
    for inside in (FALL, None, build()):
        with pytest.raises(ScheduleError, match="must be a FieldScheduler or an OptimizerParamScheduler"):
            Plateau(inside)  # type: ignore[arg-type]
    for metric in ("good", None, [1.0]):
        with pytest.raises(ScheduleError, match=r"metric=.* must be one number"):
            build().observe(metric)  # type: ignore[arg-type]
