"""Megatron-Core's numbers: some measured on it, and its formulas, written down a second time."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opt_scheduler import OptimizerParamScheduler

BASE: dict[str, Any] = {
    "init_lr": 0.0, "max_lr": 1e-3, "min_lr": 1e-4, "lr_warmup_steps": 10, "lr_decay_steps": 110,
    "start_wd": 0.0, "end_wd": 0.1, "wd_incr_steps": 110, "wd_incr_style": "linear",
}  # fmt: skip


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


def reference_lr(n: float, *, high: float, low: float, a: dict[str, Any]) -> float:
    """Megatron-Core's learning rate. Past its end, its inverse square root jumps to `low`, which is not wanted here."""
    init, warm, decay, style = a["init_lr"], a["lr_warmup_steps"], a["lr_decay_steps"], a["lr_decay_style"]
    if warm > 0 and n <= warm:
        return float(init + (high - init) * n / warm)
    if style == "constant":
        return high
    if style == "inverse-square-root":
        return float(max(low, high * max(warm, 1) ** 0.5 / max(n, 1) ** 0.5))
    if n > decay:
        return low
    r = (n - warm) / (decay - warm)
    if style == "WSD":
        start = decay - a["wsd_decay_steps"]
        r = max((n - start) / a["wsd_decay_steps"], 0.0)
    coefficient = {
        "linear": 1.0 - r,
        "cosine": 0.5 * (math.cos(math.pi * r) + 1.0),
        "exponential": 2.0 * 0.5**r - 1.0,
        "minus_sqrt": 1.0 - math.sqrt(r),
    }[a["lr_wsd_decay_style"] if style == "WSD" else style]
    return float(low + coefficient * (high - low))


def reference_wd(n: float, *, start: float, end: float, a: dict[str, Any]) -> float:
    if n > a["wd_incr_steps"]:
        return end
    r = n / a["wd_incr_steps"]
    coefficient = r if a["wd_incr_style"] == "linear" else 0.5 * (math.cos(math.pi * (1 - r)) + 1.0)
    return start + coefficient * (end - start)


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


@given(arguments(), st.floats(0, 1.5))
@settings(max_examples=300, deadline=None)
def test_it_equals_the_reference_s_formulas(a: dict[str, Any], where: float) -> None:
    scheduler = build(**a)
    n = round(where * a["lr_decay_steps"])
    scheduler.step(n)
    group = scheduler.param_groups[0]
    clamped = min(n, a["lr_decay_steps"]) if a["lr_decay_style"] == "inverse-square-root" else n
    lr = reference_lr(clamped, high=a["max_lr"], low=a["min_lr"], a=a)
    # Megatron-Core's formula may round a fraction to just above 1; here it is clamped.
    assert group["lr"] == pytest.approx(lr, rel=1e-12, abs=4 * 2**-52 * a["max_lr"])
    wd = reference_wd(n, start=a["start_wd"], end=a["end_wd"], a=a)
    assert group["weight_decay"] == pytest.approx(wd, rel=1e-12, abs=1e-300)


@given(arguments(), st.lists(st.integers(0, 5_000), max_size=8))
@settings(max_examples=100, deadline=None)
def test_any_split_of_the_increments_is_the_same(a: dict[str, Any], increments: list[int]) -> None:
    in_one, split = build(**a), build(**a)
    in_one.step(sum(increments))
    for increment in increments:
        split.step(increment)
    assert in_one.param_groups == split.param_groups


@pytest.mark.parametrize("style", ["linear", "cosine", "exponential", "minus_sqrt"])
@given(
    decay=st.floats(4.0, 1e6), anneal=st.floats(0.25, 1.0), warm=st.floats(0.0, 1.0), where=st.floats(0.0, 1.0),
    low=st.floats(0.0, 1.0), high=st.floats(0.0, 1.0),
)  # fmt: skip
@example(decay=200.0, anneal=0.01, warm=0.0, where=1.0, low=0.0, high=1.0)  # gave -8.88e-16
@settings(max_examples=100, deadline=None)
def test_fractional_steps_stay_within_the_bounds(
    style: str, decay: float, anneal: float, warm: float, where: float, low: float, high: float
) -> None:
    low, high = sorted((low, high))
    scheduler = build(
        min_lr=low, max_lr=high, init_lr=low, lr_decay_style="WSD", lr_wsd_decay_style=style,
        lr_decay_steps=decay, wsd_decay_steps=decay * anneal, lr_warmup_steps=int(decay * (1 - anneal) * warm * 0.999),
    )  # fmt: skip
    for step in (where * decay, decay, math.nextafter(decay, 0), decay * (1 - anneal) + where * decay * anneal):
        assert low <= scheduler.lr_at(step) <= high, step


@given(first=st.floats(0.0, 1.0), last=st.floats(0.0, 1.0), steps=st.integers(1, 1000))
@example(first=0.06, last=0.87, steps=10)  # the ramp ended at 0.8700000000000001
@example(first=0.29, last=0.91, steps=17)  # the warmup at 0.9100000000000001
@settings(max_examples=200, deadline=None)
def test_the_ends_of_warmup_and_of_the_weight_decays_ramp_are_not_overshot(
    first: float, last: float, steps: int
) -> None:
    first, last = sorted((first, last))
    scheduler = build(
        init_lr=first, max_lr=last, min_lr=0.0, lr_decay_style="constant", lr_warmup_steps=steps,
        lr_decay_steps=steps + 1, start_wd=first, end_wd=last, wd_incr_steps=steps,
    )  # fmt: skip
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
