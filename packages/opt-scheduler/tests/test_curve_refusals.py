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


FALL = linear(1.0, 0.0, steps=5)
# How the message begins, and what was asked for. A recipe names its own arguments, not those of the curves inside.
REFUSED: dict[str, Callable[[], object]] = {
    "linear: steps=0 must be more than 0": lambda: linear(1.0, 0.0, steps=0),
    "cosine: start=nan must be a finite number": lambda: cosine(math.nan, 0.0, steps=1),
    "constant: value='1e-3' must be a finite number, not text; YAML": lambda: constant("1e-3"),  # type: ignore[arg-type]
    "ramp: shape='cosin' is not known: use one of 'cosine', 'exp": lambda: ramp(1.0, 0.0, steps=1, shape="cosin"),
    "exponential: end=0.0 must be more than 0": lambda: exponential(1.0, 0.0, steps=1),
    "piecewise_linear: the steps of points=((0, 1), (3, 0), (2, 1)) must": lambda: piecewise_linear(
        (0, 1), (3, 0), (2, 1)
    ),
    "join: part 0, Constant(value=1.0, steps=None), has no end, so part 1": lambda: join(constant(1.0), constant(2.0)),
    "join: needs at least one schedule": join,
    "repeat: Constant(value=1.0, steps=None) has no end at which": lambda: repeat(constant(1.0)),
    "repeat: times=0 must be at least 1": lambda: repeat(FALL, times=0),
    "restarts: Constant(value=1.0, steps=None) has no end at which": lambda: restarts(constant(1.0)),
    "restarts: t_mult=0.5 makes ever shorter periods; pass times=": lambda: restarts(FALL, t_mult=0.5),
    "restarts: times=1.5 must be a whole number": lambda: restarts(FALL, times=1.5),  # type: ignore[arg-type]
    "clip: low=2.0 must be at most high=1.0": lambda: clip(constant(1.0), low=2.0, high=1.0),
    "clip: needs low=, high= or both": lambda: clip(constant(1.0)),
    "piecewise_constant: at=[1, 2] has 2 steps, at which 3 values": lambda: piecewise_constant([1.0, 2.0], at=[1, 2]),
    "piecewise_constant: values={0: 1.0} and at=[] must be lists": lambda: piecewise_constant({0: 1.0}, at=[]),  # type: ignore[arg-type]
    "cosine: steps=-5 must be more than 0": lambda: cosine(1.0, 0.0, steps=-5),
    "shifted_exponential: steps=0 must be more than 0": lambda: shifted_exponential(1.0, 0.0, steps=0),
    "wsd: warmup_steps=-1 must": lambda: wsd(1.0, warmup_steps=-1, stable_steps=1, decay_steps=1),
    "wsd: stable_steps=-1 must": lambda: wsd(1.0, stable_steps=-1, decay_steps=1),
    "wsd: decay_steps=0 must": lambda: wsd(1.0, stable_steps=1, decay_steps=0),
    "wsd: pass either steps or stable_steps": lambda: wsd(1.0, steps=9, stable_steps=1, decay_steps=1),
    "one_cycle: up_steps=0 must": lambda: one_cycle(1.0, up_steps=0, down_steps=1),
    "cyclic: down_steps=0 must": lambda: cyclic(0.0, 1.0, up_steps=1, down_steps=0),
    "step_decay: every=0 must": lambda: step_decay(1.0, factor=0.5, every=0, times=2),
    "cooldown: steps=0 must": lambda: cooldown(constant(1.0), at=5, steps=0),
    "cut: steps=0 must": lambda: cut(constant(1.0), 0),
    "extend: at=5 must be before steps=10 and before": lambda: extend(constant(1.0), at=5, steps=10),
    "extend: at=5 must be before steps=10": lambda: extend(FALL, at=5, steps=10),
    "kind='rampp' is not known: use one of '": lambda: Schedule.from_dict({"kind": "rampp"}),
    "schedule 'constant': field='valu' is not known: use one of 'steps', 'value'; did you mean 'value'?": (
        lambda: Schedule.from_dict({"kind": "constant", "valu": 1.0})
    ),
    "schedule 'constant' cannot be built from {'kind'": lambda: Schedule.from_dict({"kind": "constant"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_with_a_reason(message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        REFUSED[message]()
    assert str(caught.value).startswith(message)


def test_wsd_may_have_no_stable_phase() -> None:
    schedule = wsd(1.0, steps=6, warmup_steps=2, decay_steps=4, shape="linear")
    assert schedule.values([0, 2, 4, 6]) == [0.0, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("step", ["a", None, [1, 2], math.nan])
def test_a_step_that_is_no_number_is_refused(step: object) -> None:
    # NaN gave the end value; the others a TypeError about '>'.
    with pytest.raises(ScheduleError, match=r"^ramp: step="):
        linear(1.0, 0.0, steps=10)(step)  # type: ignore[arg-type]
