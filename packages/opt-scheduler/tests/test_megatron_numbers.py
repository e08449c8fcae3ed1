"""Megatron-Core's numbers: measured on it, or its formulas by hand; and what holds for all arguments."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opt_scheduler import OptimizerParamScheduler

BASE: dict[str, Any] = {
    "init_lr": 0.0,
    "max_lr": 1e-3,
    "min_lr": 1e-4,
    "lr_warmup_steps": 10,
    "lr_decay_steps": 110,
    "start_wd": 0.0,
    "end_wd": 0.1,
    "wd_incr_steps": 110,
    "wd_incr_style": "linear",
}


def build(**arguments: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(SimpleNamespace(param_groups=[{"params": []}]), **BASE | arguments)


MEASURED = [  # the style, that of the last 20 steps, the steps, the rates there in units of 1e-4
    ("linear", None, (5, 11, 60, 111), (5, 9.91, 5.5, 1)),
    ("cosine", None, (11, 60, 90), (9.99778, 5.5, 1.85942)),
    ("inverse-square-root", None, (11, 60, 110, 111), (9.53463, 4.08248, 3.01511, 3.01511)),
    ("WSD", "linear", (90, 91, 105), (10, 9.55, 3.25)),
    ("WSD", "cosine", (91, 95, 105), (9.9446, 8.68198, 2.31802)),
    ("WSD", "exponential", (91, 95, 105), (9.38685, 7.13614, 2.70286)),
    ("WSD", "minus_sqrt", (91, 95, 105), (7.98754, 5.5, 2.20577)),
]


@pytest.mark.parametrize(("style", "anneal", "steps", "expected"), MEASURED)
def test_rates_are_megatron_cores_to_the_printed_digits(style: str, anneal: Any, steps: Any, expected: Any) -> None:
    scheduler = build(lr_decay_style=style, wsd_decay_steps=20, lr_wsd_decay_style=anneal)
    assert [f"{scheduler.lr_at(step) * 1e4:.6g}" for step in steps] == [f"{rate:.6g}" for rate in expected]


# The same formulas with other arguments, by hand: the rates in units of 1e-4.
BY_HAND: list[tuple[str, dict[str, Any], dict[float, float]]] = [
    ("constant", {}, {10: 10, 60: 10, 200: 10}),
    ("linear", {"init_lr": 5e-4}, {0: 5, 4: 7, 10: 10}),
    ("cosine", {"lr_warmup_steps": 0, "lr_decay_steps": 100, "min_lr": 0.0}, {0: 10, 50: 5, 100: 0}),
    ("inverse-square-root", {"lr_warmup_steps": 0}, {0: 10, 1: 10, 4: 5, 25: 2}),
    ("inverse-square-root", {"min_lr": 8e-4}, {11: 9.53463, 60: 8, 200: 8}),
    ("WSD", {"lr_wsd_decay_style": "linear", "wsd_decay_steps": 100}, {10: 10, 60: 5.5, 110: 1, 200: 1}),
]


@pytest.mark.parametrize(("style", "given", "expected"), BY_HAND)
def test_rates_follow_the_arguments(style: str, given: dict[str, Any], expected: dict[float, float]) -> None:
    scheduler = build(lr_decay_style=style, **given)
    assert [scheduler.lr_at(step) * 1e4 for step in expected] == pytest.approx(list(expected.values()), rel=1e-6)


def test_weight_decays_rise_linearly_or_by_half_a_cosine() -> None:
    for style, third in (("linear", 1 / 30), ("cosine", 0.025)):
        scheduler = build(lr_decay_style="linear", wd_incr_style=style)
        assert [scheduler.wd_at(110 * part / 6) for part in (0, 2, 3, 6, 9)] == pytest.approx(
            [0, third, 0.05, 0.1, 0.1]
        )


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    max_lr = draw(st.floats(1e-8, 10))
    decay = draw(st.integers(2, 100_000))
    warm = draw(st.integers(0, decay - 1))
    end_wd = draw(st.floats(0, 1))
    return {
        "max_lr": max_lr,
        "min_lr": max_lr * draw(st.floats(0, 1)),
        "init_lr": max_lr * draw(st.floats(0, 1)),
        "lr_warmup_steps": warm,
        "lr_decay_steps": decay,
        "lr_decay_style": draw(st.sampled_from(["constant", "linear", "cosine", "inverse-square-root", "WSD"])),
        "wsd_decay_steps": max(1, (decay - warm) * draw(st.floats(0.01, 1))),
        "lr_wsd_decay_style": draw(st.sampled_from(["linear", "cosine", "exponential", "minus_sqrt"])),
        "start_wd": end_wd * draw(st.floats(0, 1)),
        "end_wd": end_wd,
        "wd_incr_steps": draw(st.integers(1, 100_000)),
        "wd_incr_style": draw(st.sampled_from(["linear", "cosine"])),
    }


@given(arguments(), st.lists(st.integers(0, 5_000), max_size=8))
@settings(max_examples=100, deadline=None)
def test_any_split_of_the_increments_is_the_same(a: dict[str, Any], increments: list[int]) -> None:
    in_one = build(**a)
    split = build(**a)
    in_one.step(sum(increments))
    for increment in increments:
        split.step(increment)
    assert in_one.param_groups == split.param_groups


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential", "minus_sqrt"])
@given(
    decay=st.floats(4.0, 1e6),
    anneal=st.floats(0.25, 1.0),
    warm=st.floats(0.0, 1.0),
    where=st.floats(0.0, 1.0),
    low=st.floats(0.0, 1.0),
    high=st.floats(0.0, 1.0),
)
@example(decay=200.0, anneal=0.01, warm=0.0, where=1.0, low=0.0, high=1.0)  # gave -8.88e-16
@settings(max_examples=100, deadline=None)
def test_fractional_steps_stay_within_the_bounds(
    style: str, decay: float, anneal: float, warm: float, where: float, low: float, high: float
) -> None:
    low, high = sorted((low, high))
    scheduler = build(
        min_lr=low,
        max_lr=high,
        init_lr=low,
        lr_decay_style="WSD",
        lr_wsd_decay_style=style,
        lr_decay_steps=decay,
        wsd_decay_steps=decay * anneal,
        lr_warmup_steps=int(decay * (1 - anneal) * warm * 0.999),
    )
    for step in (where * decay, decay, math.nextafter(decay, 0), decay * (1 - anneal) + where * decay * anneal):
        assert low <= scheduler.lr_at(step) <= high, step


@given(first=st.floats(0.0, 1.0), last=st.floats(0.0, 1.0), steps=st.integers(1, 1000))
@example(first=0.06, last=0.87, steps=10)  # the ramp ended at 0.8700000000000001
@example(first=0.29, last=0.91, steps=17)  # the warmup at 0.9100000000000001
@settings(max_examples=200, deadline=None)
def test_warmup_and_weight_decay_do_not_overshoot_their_ends(first: float, last: float, steps: int) -> None:
    first, last = sorted((first, last))
    scheduler = build(
        init_lr=first,
        max_lr=last,
        min_lr=0.0,
        lr_decay_style="constant",
        lr_warmup_steps=steps,
        lr_decay_steps=steps + 1,
        start_wd=first,
        end_wd=last,
        wd_incr_steps=steps,
    )
    assert scheduler.lr_at(steps) <= last
    assert scheduler.wd_at(steps) <= last


def test_the_first_update_is_wasted_only_if_requested() -> None:
    base = {"max_lr": 1.0, "min_lr": 0.0, "lr_decay_style": "linear"}
    falling = [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    for first, rising in (("init", [0, 0.25, 0.5, 0.75]), ("one", [0.25, 0.5, 0.75, 1])):
        scheduler = build(**base, lr_warmup_steps=4, lr_decay_steps=10, warmup_first=first)
        assert [scheduler.lr_at(k) for k in range(10)] == pytest.approx([*rising, *falling], rel=1e-15)
    # Counted in samples, the warmup runs ahead by one batch.
    scheduler = build(**base, lr_warmup_steps=1024, lr_decay_steps=4096, warmup_first=256)
    assert [scheduler.lr_at(256 * k) for k in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
