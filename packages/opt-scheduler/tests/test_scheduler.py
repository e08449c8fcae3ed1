"""`OptimizerParamScheduler` on groups: what it reads, what it writes, what it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest

from opt_scheduler import OptimizerParamScheduler, ScheduleError, get_canonical_lr_for_logging

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


def build(*groups: dict[str, Any], **arguments: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(SimpleNamespace(param_groups=list(groups) or [{}]), **BASE | arguments)


def written(scheduler: OptimizerParamScheduler, field: str = "lr") -> list[float]:
    return [group[field] for group in scheduler.param_groups]


def test_construction_writes_the_groups_and_a_step_counts_one() -> None:
    group = {"lr": 3e-4, "weight_decay": 0.05}
    build(group, init_lr=0.01, start_wd=0.1)
    assert group == {"lr": 0.01, "weight_decay": 0.1}
    scheduler = build()
    scheduler.step()
    assert (scheduler.num_steps, written(scheduler)) == (1, [0.1])


def test_the_canonical_lr_is_that_of_the_first_default_group() -> None:
    groups = [{"lr": 1.0}, {"lr": 2.0, "default_config": True}, {"lr": 3.0, "default_config": True}]
    assert get_canonical_lr_for_logging(groups) == 2.0
    assert get_canonical_lr_for_logging(groups[:1]) is None
    assert get_canonical_lr_for_logging([]) is None
    assert get_canonical_lr_for_logging([{"default_config": True}]) is None  # no lr yet, as in Megatron-Core


@pytest.mark.parametrize(
    ("key", "values", "field", "expected"),
    [
        ("max_lr", (1.0, 0.5), "lr", [0.55, 0.3, 0.55]),
        ("min_lr", (0.1, 0.3), "lr", [0.55, 0.65, 0.55]),
        ("start_wd", (0.0, 0.1), "weight_decay", [0.1, 0.15, 0.1]),
        ("end_wd", (0.2, 0.4), "weight_decay", [0.1, 0.2, 0.1]),
        ("wd_mult", (1.0, 0.5), "weight_decay", [0.1, 0.05, 0.1]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_neighbouring_groups_that_differ_in_one_bound_differ(
    key: str, values: tuple[float, float], field: str, expected: list[float]
) -> None:
    scheduler = build({key: values[0]}, {key: values[1]}, {key: values[0]})
    scheduler.step(50 if field == "weight_decay" else 60)
    assert written(scheduler, field) == pytest.approx(expected, rel=1e-15)


def test_an_override_of_none_is_one_that_was_not_set() -> None:
    # A configuration's min_lr is None by default, and Megatron-Core copies it into every group, where it fails later.
    assert build(min_lr=None).lr_at(110) == 0.0
    unset = {"max_lr": None, "min_lr": None, "start_wd": None, "end_wd": None, "wd_mult": None}
    scheduler = build({}, unset)
    scheduler.step(60)
    assert written(scheduler)[0] == written(scheduler)[1]
    assert written(scheduler, "weight_decay")[0] == written(scheduler, "weight_decay")[1]


def test_groups_are_read_anew_at_every_step() -> None:
    scheduler = build({})
    scheduler.optimizer.param_groups.append({"max_lr": 0.5})  # type: ignore[union-attr]
    scheduler.step(10)
    scheduler.param_groups[0]["max_lr"] = 2.0
    assert written(scheduler) == [1.0, 0.5]
    scheduler.step(0)
    assert written(scheduler) == [2.0, 0.5]


def test_several_optimizers_are_scheduled_together() -> None:
    one = SimpleNamespace(param_groups=[{}])
    other = SimpleNamespace(param_groups=[{"max_lr": 0.2}, {}])
    scheduler = OptimizerParamScheduler([one, other], **BASE)
    scheduler.step(10)
    assert [group["lr"] for group in one.param_groups + other.param_groups] == [1.0, 0.2, 1.0]


def test_looking_ahead_does_not_move() -> None:
    scheduler = build({"max_lr": 0.5})
    scheduler.step(3)
    before = [dict(group) for group in scheduler.param_groups]
    assert scheduler.lr_at(10, {"max_lr": 0.5}) == 0.5
    assert scheduler.lr_at(10) == 1.0
    assert scheduler.wd_at(50) == pytest.approx(0.1)
    assert scheduler.lr_schedule({"max_lr": 0.5})(10) == 0.5
    assert (scheduler.num_steps, scheduler.param_groups) == (3, before)


def test_seek_goes_back_where_step_refuses_to() -> None:
    scheduler = build()
    scheduler.step(50)
    with pytest.raises(ScheduleError, match=r"step: increment=-3 must be at least 0 and finite; seek\(\) can go back"):
        scheduler.step(-3)
    assert scheduler.num_steps == 50
    scheduler.seek(5)
    assert (scheduler.num_steps, written(scheduler)) == (5, [0.5])
    with pytest.raises(ScheduleError, match=r"seek: num_steps=-1 must be at least 0"):
        scheduler.seek(-1)


def test_assigned_settings_are_validated_and_used() -> None:
    scheduler = build()
    assert {name: getattr(scheduler, name) for name in BASE} == BASE
    scheduler.max_lr = 2.0
    scheduler.step(10)
    assert written(scheduler) == [2.0]
    with pytest.raises(ScheduleError, match=r"max_lr=0.05 must be at least min_lr=0.1"):
        scheduler.max_lr = 0.05
    assert scheduler.max_lr == 2.0


def test_groups_follow_assigned_bounds_with_their_lr_mult() -> None:
    copies: list[dict[str, Any]] = [
        {"max_lr": 1.0, "min_lr": 0.1},
        {"max_lr": 0.5, "min_lr": 0.05, "lr_mult": 0.5},
        {"max_lr": 0.7, "min_lr": 0.1},
    ]
    scheduler = build(*copies)
    scheduler.max_lr = 2.0
    scheduler.step(10)
    assert written(scheduler) == [2.0, 1.0, 0.7]


def test_bounds_that_no_group_reads_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """As `get_optimizer` gives every group bounds of its own."""
    own = {"max_lr": 0.5, "min_lr": 0.1}
    build({**own}, {**own, "max_lr": 1.0})
    assert not caplog.text
    build({**own}, {**own})
    assert "max_lr=1.0 has no effect: every parameter group has its own" in caplog.text


class Scalar(int):
    """Like those of NumPy and torch."""

    def item(self) -> int:
        return int(self)


def test_counts_are_plain_numbers() -> None:
    scheduler = build()
    scheduler.step(Scalar(3))
    scheduler.seek(Scalar(5))
    assert type(scheduler.num_steps) is int
    assert type(build(max_lr=type("Float", (float,), {})(1.0)).max_lr) is float


def test_trainers_find_the_attributes_they_look_for() -> None:
    scheduler = build({}, {"max_lr": 0.5})
    scheduler.step(5)
    assert scheduler.base_lrs == [1.0, 0.5]
    assert scheduler.get_last_lr() == [0.5, 0.25]
    assert scheduler.last_epoch == 5


REFUSED_GROUPS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"max_lr": 0.05}, {}, "{'max_lr': 0.05}: max_lr=0.05 must be at least min_lr=0.1"),
    ({"max_lr": 0.2}, {"init_lr": 0.5}, "max_lr=0.2 must be at least init_lr=0.5, at which"),
    ({"end_wd": 0.0}, {"start_wd": 0.1}, "end_wd=0.0 must be at least start_wd=0.1"),
    ({"end_wd": 0.5}, {"start_wd": 0.2, "wd_incr_style": "constant"}, "needs start_wd=0.2 equal to end_wd=0.5"),
    ({"max_lr": "1e-3"}, {}, "max_lr='1e-3' must be a number, at least 0"),
    ({"wd_mult": float("nan")}, {}, "{'wd_mult': nan}: wd_mult=nan must be a number, at least 0"),
]


@pytest.mark.parametrize(("group", "arguments", "message"), REFUSED_GROUPS, ids=lambda value: str(value)[:40])
def test_overrides_that_cannot_be_are_refused_when_built(
    group: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ScheduleError) as caught:
        build({}, group, **arguments)
    assert str(caught.value).startswith("group 1 with {")
    assert message in str(caught.value)


def test_a_refused_step_changes_nothing() -> None:
    scheduler = build({}, {})
    scheduler.step(5)
    scheduler.param_groups[1]["max_lr"] = 0.01
    with pytest.raises(ScheduleError, match="group 1"):
        scheduler.step(5)
    assert (scheduler.num_steps, written(scheduler)) == (5, [0.5, 0.5])


WSD: dict[str, Any] = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "cosine", "wsd_decay_steps": 20}
# Megatron-Core accepts most of these and fails later, or never.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"init_lr": -1e-3}, "init_lr=-0.001 must be a number, at least 0"),
    ({"init_lr": 2.0}, "max_lr=1.0 must be at least init_lr=2.0, at which the warmup of every group begins"),
    ({"min_lr": -0.1}, "min_lr=-0.1 must be a number, at least 0"),
    ({"min_lr": 2.0}, "max_lr=1.0 must be at least min_lr=2.0"),
    ({"max_lr": float("nan")}, "max_lr=nan must be a finite number"),
    ({"max_lr": None}, "max_lr=None must be a finite number"),
    ({"max_lr": "1e-3"}, "max_lr='1e-3' must be a finite number"),
    ({"lr_warmup_steps": -1}, "lr_warmup_steps=-1 must not be negative; 0 turns warmup off"),
    ({"lr_warmup_steps": 0.1}, "lr_warmup_steps=0.1 is less than a step; for a fraction of the run, pass 0.1 * lr_d"),
    ({"lr_decay_steps": 0, "lr_warmup_steps": 0}, "lr_decay_steps=0 must be positive"),
    ({"lr_warmup_steps": 110}, "lr_warmup_steps=110 must be less than lr_decay_steps=110, which counts from step 0"),
    ({"lr_decay_style": "wsd"}, "lr_decay_style='wsd' is not known: use one of 'WSD', 'constant', 'cosine', 'inverse"),
    (WSD | {"lr_wsd_decay_style": "1-sqrt"}, "lr_wsd_decay_style='1-sqrt' is not known: use one of 'cosine', 'exp"),
    (WSD | {"lr_wsd_decay_style": None}, "lr_wsd_decay_style=None, but 'WSD' needs one of 'linear', 'cosine'"),
    (WSD | {"wsd_decay_steps": None}, "wsd_decay_steps=None, but 'WSD' needs the length of its anneal"),
    (WSD | {"wsd_decay_steps": 0}, "wsd_decay_steps=0 must be positive; without an anneal, use 'constant'"),
    (WSD | {"wsd_decay_steps": 0.2}, "wsd_decay_steps=0.2 is less than a step"),
    (WSD | {"wsd_decay_steps": 101}, "wsd_decay_steps=101 must fit between the warmup and the end: lr_decay_steps -"),
    ({"start_wd": -0.1}, "start_wd=-0.1 must be a number, at least 0"),
    ({"start_wd": 0.3}, "end_wd=0.2 must be at least start_wd=0.3; for a falling weight decay use FieldScheduler(opti"),
    ({"wd_incr_style": "sine"}, "wd_incr_style='sine' is not known: use one of 'constant', 'cosine', 'linear'; did yo"),
    ({"wd_incr_steps": 0}, "wd_incr_steps=0 must be positive for wd_incr_style='linear'"),
    ({"wd_incr_style": "constant"}, "wd_incr_style='constant' needs start_wd=0.0 equal to end_wd=0.2"),
    ({"warmup_first": "two"}, "warmup_first='two' must be 'init', 'one' or a positive number, the size of an incr"),
    ({"override_opt_param_scheduler": True}, "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler con"),
    ({"override_opt_param_scheduler": ["lr"]}, "override_opt_param_scheduler: field='lr' is not known: use one of"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_is_refused_when_built(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build(**arguments)
    assert str(caught.value).startswith(f"OptimizerParamScheduler: {message}")


def test_all_problems_are_listed_in_one_value_error() -> None:
    # A test suite that catches AssertionError took a refused setting for a failed check.
    with pytest.raises(ValueError, match="3 problems") as caught:
        build(init_lr=-1.0, lr_decay_style="cosin", wd_incr_steps=-5)
    assert not isinstance(caught.value, AssertionError)
    assert [line.partition("=")[0] for line in str(caught.value).splitlines()] == [
        "OptimizerParamScheduler: 3 problems",
        "  - init_lr",
        "  - lr_decay_style",
        "  - wd_incr_steps",
    ]
