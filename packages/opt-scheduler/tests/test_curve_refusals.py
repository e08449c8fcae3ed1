"""Curves that cannot be are refused with a reason."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from opt_scheduler import (
    Schedule,
    ScheduleError,
    clip,
    constant,
    cooldown,
    cosine,
    cut,
    cyclic,
    exponential,
    extend,
    join,
    linear,
    one_cycle,
    piecewise_constant,
    piecewise_linear,
    ramp,
    repeat,
    restarts,
    shifted_exponential,
    step_decay,
    wsd,
)


def test_a_restart_falls_on_its_own_step_however_its_logarithm_rounds() -> None:
    for t_mult in (3.0, 1.1, 1.5, 7.0, 1.01, 2.3):
        schedule: Any = restarts(linear(1.0, 0.0, steps=5), t_mult=t_mult)
        for period in range(18):
            start = schedule.start_of(period)
            assert schedule(start) == 1.0
            assert schedule(math.nextafter(start, math.inf)) == pytest.approx(1.0)
            assert period == 0 or 0 <= schedule(math.nextafter(start, 0.0)) < 1e-9


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no-steps": (lambda: linear(1.0, 0.0, steps=0), "linear: steps=0 must be more than 0"),
    "nan": (lambda: cosine(math.nan, 0.0, steps=1), "cosine: start=nan must be a finite number"),
    "a-string": (
        lambda: constant("1e-3"),
        "constant: value='1e-3' must be a finite number, not text; YAML reads 1e-4 as text",
    ),  # type: ignore[arg-type]
    "unknown-shape": (
        lambda: ramp(1.0, 0.0, steps=1, shape="cosin"),
        "ramp: shape='cosin' is not known: use one of 'cosine', 'exponential', 'linear', 'minus_sqrt', 'minus_square'; "
        "did you mean 'cosine'?",
    ),
    "exponential-to-zero": (lambda: exponential(1.0, 0.0, steps=1), "exponential: end=0.0 must be more than 0"),
    "knots-descend": (
        lambda: piecewise_linear((0, 1.0), (3, 0.0), (2, 1.0)),
        "piecewise_linear: the steps of points=((0, 1.0), (3, 0.0), (2, 1.0)) must ascend from 0",
    ),
    "endless-then-more": (
        lambda: join(constant(1.0), constant(2.0)),
        "join: part 0, Constant(value=1.0, steps=None), has no end, so part 1 never begins; pass steps=",
    ),
    "join-nothing": (join, "join: needs at least one schedule"),
    "repeat-endless": (
        lambda: repeat(constant(1.0)),
        "repeat: Constant(value=1.0, steps=None) has no end at which to begin again; pass steps=",
    ),
    "repeat-never": (lambda: repeat(linear(1.0, 0.0, steps=1), times=0), "repeat: times=0 must be at least 1"),
    "restarts-endless": (
        lambda: restarts(constant(1.0)),
        "restarts: Constant(value=1.0, steps=None) has no end at which to restart; pass steps=",
    ),
    "restarts-never-ending": (
        lambda: restarts(linear(1.0, 0.0, steps=4), t_mult=0.5),
        "restarts: t_mult=0.5 makes ever shorter periods; pass times=",
    ),
    "restarts-partly": (
        lambda: restarts(linear(1.0, 0.0, steps=4), times=1.5),  # type: ignore[arg-type]
        "restarts: times=1.5 must be a whole number",
    ),
    "clip-crossed": (lambda: clip(constant(1.0), low=2.0, high=1.0), "clip: low=2.0 must be at most high=1.0"),
    "clip-open": (lambda: clip(constant(1.0)), "clip: needs low=, high= or both"),
    "values-and-edges": (
        lambda: piecewise_constant([1.0, 2.0], at=[1, 2]),
        "piecewise_constant: at=[1, 2] has 2 steps, at which 3 values meet, but there are 2 values",
    ),
    "values-by-name": (
        lambda: piecewise_constant({0: 1.0, 5: 2.0}, at=[1]),  # type: ignore[arg-type]
        "piecewise_constant: values={0: 1.0, 5: 2.0} and at=[1] must be lists or tuples of numbers",
    ),
    "a-curve-by-its-name": (lambda: cosine(1.0, 0.0, steps=-5), "cosine: steps=-5 must be more than 0"),
    "a-shifted-curve": (
        lambda: shifted_exponential(1.0, 0.0, steps=0),
        "shifted_exponential: steps=0 must be more than 0",
    ),
    # wsd(decay_steps=0) complained of "ramp: steps=0", an argument that was not passed.
    "wsd-warmup": (lambda: wsd(1.0, warmup_steps=-1, stable_steps=1, decay_steps=1), "wsd: warmup_steps=-1 must"),
    "wsd-stable": (lambda: wsd(1.0, stable_steps=-1, decay_steps=1), "wsd: stable_steps=-1 must"),
    "wsd-decay": (lambda: wsd(1.0, stable_steps=1, decay_steps=0), "wsd: decay_steps=0 must"),
    "wsd-both": (lambda: wsd(1.0, steps=9, stable_steps=1, decay_steps=1), "wsd: pass either steps or stable_steps"),
    "one-cycle": (lambda: one_cycle(1.0, up_steps=0, down_steps=1), "one_cycle: up_steps=0 must"),
    "cyclic": (lambda: cyclic(0.0, 1.0, up_steps=1, down_steps=0), "cyclic: down_steps=0 must"),
    "step-decay": (lambda: step_decay(1.0, factor=0.5, every=0, times=2), "step_decay: every=0 must"),
    "cooldown": (lambda: cooldown(constant(1.0), at=5, steps=0), "cooldown: steps=0 must"),
    "cut": (lambda: cut(constant(1.0), 0), "cut: steps=0 must"),
    "extend-endless": (
        lambda: extend(constant(1.0), at=5, steps=10),
        "extend: at=5 must be before steps=10 and before",
    ),
    "extend-late": (lambda: extend(linear(1.0, 0.0, steps=5), at=5, steps=10), "extend: at=5 must be before steps=10"),
    "unknown-kind": (
        lambda: Schedule.from_dict({"kind": "rampp"}),
        "kind='rampp' is not known: use one of '",
    ),
    "unknown-field": (
        lambda: Schedule.from_dict({"kind": "constant", "valu": 1.0}),
        "schedule 'constant': field='valu' is not known: use one of 'steps', 'value'; did you mean 'value'?",
    ),
    "missing-field": (
        lambda: Schedule.from_dict({"kind": "constant"}),
        "schedule 'constant' cannot be built from {'kind': 'constant'}: ",
    ),
}


@pytest.mark.parametrize(("build", "message"), [pytest.param(*case, id=name) for name, case in REFUSED.items()])
def test_what_cannot_be_is_refused_with_a_reason(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build()
    assert str(caught.value).startswith(message)


def test_wsd_may_have_no_stable_phase() -> None:
    schedule = wsd(1.0, steps=6, warmup_steps=2, decay_steps=4, shape="linear")
    assert schedule.values([0, 2, 4, 6]) == [0.0, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("step", ["a", None, [1, 2], math.nan])
def test_a_step_that_is_no_number_is_refused(step: object) -> None:
    # NaN gave the end value; the others a TypeError about '>'.
    with pytest.raises(ScheduleError, match=r"^ramp: step="):
        linear(1.0, 0.0, steps=10)(step)  # type: ignore[arg-type]
