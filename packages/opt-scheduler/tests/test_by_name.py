"""`get_schedule`: names and options as a configuration file gives them, with the numbers of HF transformers."""

import math
from typing import Any

import pytest

from opt_scheduler import (
    SCHEDULE_NAMES,
    Schedule,
    ScheduleError,
    constant,
    cosine,
    cut,
    cyclic,
    get_schedule,
    join,
    linear,
    one_cycle,
    piecewise_constant,
    piecewise_linear,
    polynomial,
    repeat,
    schedule_signatures,
    step_decay,
    warmup,
    wsd,
)

GIVEN: dict[str, dict[str, Any]] = {
    "exponential": {"end": 1e-5},
    "wsd": {"decay_steps": 30},
    "warmup_stable_decay": {"decay_steps": 30},
}


RECIPES = {  # which take the arguments of their functions
    "cyclic": (cyclic(0.0, 1.0, up_steps=2, down_steps=4), {"low": 0.0, "high": 1.0, "up_steps": 2, "down_steps": 4}),
    "one_cycle": (one_cycle(1.0, up_steps=3, down_steps=7), {"peak": 1.0, "up_steps": 3, "down_steps": 7}),
    "piecewise_constant": (piecewise_constant([1.0, 0.1], at=[3]), {"values": [1.0, 0.1], "at": [3]}),
    "piecewise_linear": (piecewise_linear((0, 1.0), (3, 0.0)), {"points": [[0, 1.0], [3, 0.0]]}),
    "WarmupLR": (constant(0.001), {"warmup_min_lr": 0.001}),
    "WarmupDecayLR": (
        join(constant(0.001, steps=1000), linear(0.001, 0.0, steps=500)) * 1.0,
        {"total_num_steps": 1500, "warmup_min_lr": 0.001},
    ),
    "torchtitan": (
        wsd(1.0, steps=100, warmup_steps=9, start=0.1, decay_steps=30, shape="linear"),
        {"peak": 1.0, "steps": 100, "warmup_steps": 10, "decay_ratio": 0.3},
    ),
    "step_decay": (
        step_decay(1.0, factor=0.5, every=3, times=2),
        {"start": 1.0, "factor": 0.5, "every": 3, "times": 2},
    ),
    "wsd": (
        wsd(1.0, warmup_steps=10, stable_steps=60, decay_steps=30),
        {"peak": 1.0, "steps": 100, "warmup_steps": 10, "decay_steps": 30},
    ),
}
RUN = {"peak": 1.0, "steps": 100, "warmup_steps": 10}
# What HF transformers multiplies a learning rate by, under its names.
OF_HF = [
    ("constant_with_warmup", {}, constant(1.0)),
    ("linear", {}, linear(1.0, 0.0, steps=90)),
    ("cosine", {}, cosine(1.0, 0.0, steps=90)),
    ("cosine_with_restarts", {"cycles": 3}, repeat(cosine(1.0, 0.0, steps=30), times=3)),
    ("cosine_with_min_lr", {"end": 0.1}, cosine(1.0, 0.1, steps=90)),
    ("polynomial", {"end": 0.01, "power": 2.0}, polynomial(1.0, 0.01, steps=90, power=2.0)),
    ("inverse_sqrt", {}, cut(lambda step: math.sqrt(10 / (step + 10)), 90)),
    (
        "warmup_stable_decay",
        {"decay_steps": 30, "shape": "linear"},
        join(constant(1.0, steps=60), linear(1.0, 0.0, steps=30)),
    ),
]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [(name, arguments, recipe) for name, (recipe, arguments) in RECIPES.items()]
    + [(name, RUN | options, warmup(curve, steps=10)) for name, options, curve in OF_HF],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_name_makes_the_curve_that_it_says(name: str, arguments: dict[str, Any], expected: Schedule) -> None:
    steps = [step / 4 for step in range(420)]
    assert get_schedule(name, **arguments).values(steps) == pytest.approx(expected.values(steps), rel=1e-12, abs=1e-12)


def test_the_signatures_list_every_name_and_its_defaults() -> None:
    signatures = schedule_signatures()
    assert tuple(signatures) == SCHEDULE_NAMES
    assert signatures["exponential"] == "peak, steps, end, warmup_steps=0, start=0.0"
    assert signatures["piecewise_constant"] == "values, at"
    assert signatures["warmup_stable_decay"] == signatures["wsd"].replace("minus_sqrt", "cosine")  # as in transformers
    assert get_schedule("warmup_stable_decay", peak=1.0, steps=100, decay_steps=20)(90) == pytest.approx(0.5)


@pytest.mark.parametrize("name", [name for name in SCHEDULE_NAMES if name not in RECIPES])
def test_every_name_warms_up_to_its_peak_and_ends_where_it_says(name: str) -> None:
    schedule = get_schedule(name, peak=0.5, steps=100, warmup_steps=20, start=0.1, **GIVEN.get(name, {}))
    assert schedule.values([0, 10, 20]) == pytest.approx([0.1, 0.3, 0.5], rel=1e-15)
    assert schedule.length == pytest.approx(100)
    assert schedule(100) == schedule(1e6)
    assert get_schedule(name, peak=0.5, steps=100, **GIVEN.get(name, {}))(0) == 0.5


def test_restarts_fit_into_the_steps() -> None:
    schedule = get_schedule("cosine_restarts", peak=1.0, steps=80, warmup_steps=10, cycles=3, t_mult=2, decay=0.5)
    assert schedule.values([10, 20, 40, 80]) == [1.0, 0.5, 0.25, 0.0]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_none_for_a_number_is_refused(name: str) -> None:
    """YAML's null was a TypeError."""
    given = RECIPES[name][1] if name in RECIPES else RUN | GIVEN.get(name, {})
    signature = schedule_signatures()[name].split(", ")
    for key in (argument.partition("=")[0] for argument in signature if not argument.endswith("=None")):
        if key not in ("shape", "warmup_type", "decay_type"):
            with pytest.raises(ScheduleError, match="None"):
                get_schedule(name, **given | {key: None})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "cosin"}, "schedule='cosin' is not known: use one of .*; did you mean 'cosine'?"),
        ({"name": "linear", "ned": 0.1}, "linear: argument='ned' is not known: .*; did you mean 'end'?"),
        ({"name": "linear", "power": 2}, "linear: argument='power' is not known"),
        ({"name": "wsd"}, "wsd: decay_steps must be given"),
        ({"name": "exponential"}, "exponential: end must be given"),
        (
            {"name": "wsd", "decay_steps": 90, "warmup_steps": 20},
            "wsd: decay_steps=90 must fit after the warmup: .* 80",
        ),
        ({"name": "linear", "warmup_steps": 100}, "linear: warmup_steps=100 must be less than steps=100"),
        ({"name": "linear", "warmup_steps": 0.1}, r"linear: warmup_steps=0.1 is less than a step; .* 0.1 \* steps"),
        ({"name": "wsd", "decay_steps": 0.2}, r"wsd: decay_steps=0.2 is less than a step; .* pass 0.2 \* steps"),
        ({"name": "linear", "warmup_steps": -1}, "linear: warmup_steps=-1 must be at least 0"),
        ({"name": "linear", "steps": 0}, "linear: steps=0 must be more than 0"),
        ({"name": "linear", "peak": "1e-3"}, "linear: peak='1e-3' must be a finite number, not text; YAML reads 1e-4"),
        ({"name": "cosine_restarts", "cycles": 0}, "cosine_restarts: cycles=0 must be at least 1"),
        ({"name": "cosine_restarts", "cycles": 1.5}, "repeat: times=1.5 must be a whole number"),
    ],
    ids=lambda value: str(value)[:45],
)
def test_what_a_file_gets_wrong_is_refused_in_its_own_words(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{message}"):
        get_schedule(**{"peak": 1.0, "steps": 100} | arguments)


TORCHTITAN = [(50, 8, 0.4), (50, 8, None), (50, 0, 0.2), (50, 20, 0.8), (50, 1, 1.0), (50, 49, 0.5)]


@pytest.mark.parametrize("decay_type", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize(("steps", "warmup_steps", "decay_ratio"), TORCHTITAN)
def test_torchtitans_schedule_has_its_rates(
    steps: int, warmup_steps: int, decay_ratio: float | None, decay_type: str
) -> None:
    """With W steps from 0 the first update had a rate of 0, and the warmup was one step late."""
    ours = get_schedule(
        "torchtitan",
        peak=3.0,
        steps=steps,
        warmup_steps=warmup_steps,
        decay_ratio=decay_ratio,
        decay_type=decay_type,
        min_lr_factor=0.1,
    )
    falling = {
        "linear": lambda progress: 1 - progress,
        "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
        "sqrt": lambda progress: 1 - math.sqrt(progress),
    }
    rising_steps = min(warmup_steps, steps)
    decay_steps = steps - rising_steps
    if decay_ratio is not None:
        decay_steps = min(decay_steps, round(steps * decay_ratio))
    stable_steps = steps + 1 - rising_steps - decay_steps  # with its virtual last step
    for step in range(steps):
        if step < rising_steps:
            factor = (step + 1) / rising_steps
        elif step < rising_steps + stable_steps:
            factor = 1.0
        else:
            progress = (step + 1 - rising_steps - stable_steps) / decay_steps
            factor = 0.1 + 0.9 * falling[decay_type](progress)
        assert ours(step) == pytest.approx(3.0 * factor, rel=1e-14)


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 2, 10, 60])
def test_deepspeeds_schedules_have_its_rates(warmup: int, warmup_type: str) -> None:
    """Its formulas, at every `last_batch_iteration`."""
    common: dict[str, Any] = {"warmup_num_steps": warmup, "warmup_type": warmup_type}
    low = 0.001
    high = 0.006
    rates = {"warmup_min_lr": low, "warmup_max_lr": high}
    total = 100
    kept = get_schedule("WarmupLR", **common, **rates)
    line = get_schedule("WarmupDecayLR", total_num_steps=total, **common, **rates)
    rising = max(2, warmup)
    for n in range(total):
        done = math.log(n + 1) / math.log(rising) if warmup_type == "log" else n / rising
        rate = low + (high - low) * done
        if n >= rising:
            rate = high
        assert kept(n) == pytest.approx(rate, rel=1e-13)
        if n >= rising:
            rate = low + (high - low) * (total - n) / (total - rising)
        assert line(n) == pytest.approx(rate, rel=1e-13)
