"""Operators, and plain callables and numbers where a schedule is expected."""

import json
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opt_scheduler import (
    Schedule,
    ScheduleError,
    as_schedule,
    clip,
    constant,
    cooldown,
    cut,
    join,
    linear,
    repeat,
    rescale,
    restarts,
    scale,
    shift,
    stretch,
    warmup,
)

FALL = linear(1.0, 0.0, steps=8)


def triangle(step: float) -> float:
    """A function of the step as users write it."""
    return 1.0 - abs(step - 4) / 4


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=3), st.floats(0, 20))
def test_operators_do_at_every_step_what_they_do_to_numbers(numbers: list[float], step: float) -> None:
    a, b, c = (linear(number, 1.0, steps=5 + i) for i, number in enumerate(numbers))
    x, y, z = a(step), b(step), c(step)
    assert (a + b * c)(step) == x + y * z
    assert (a - b)(step) == x - y
    assert (3 - a)(step) == 3 - x
    assert (-a)(step) == -x
    assert (a * b + 2)(step) == x * y + 2


def test_the_bracketing_does_not_matter() -> None:
    a, b, c = FALL, constant(2.0), linear(0.0, 1.0, steps=3)
    assert (a * b) * c == a * (b * c)
    assert (a + b) + c == a + (b + c)
    assert join(join(a, c), b) == join(a, join(c, b)) == join(a, c, b)


def test_a_callable_takes_part_on_either_side() -> None:
    assert (FALL * triangle)(2) == (triangle * FALL)(2) == 0.75 * 0.5
    assert (FALL + triangle)(2) == (triangle + FALL)(2) == 1.25
    assert (FALL - triangle)(2) == -(triangle - FALL)(2) == 0.25


ACCEPTING: dict[str, tuple[Callable[[], Schedule], float, float]] = {
    "join": (lambda: join(constant(2.0, steps=4), triangle), 6, 0.5),
    "warmup": (lambda: warmup(lambda step: 2.0 + step, steps=4), 2, 1.0),
    "scale": (lambda: scale(triangle, 2), 2, 1.0),
    "clip": (lambda: clip(triangle, low=0.75), 2, 0.75),
    "shift": (lambda: shift(triangle, 2), 4, 0.5),
    "stretch": (lambda: stretch(triangle, 2), 4, 0.5),
    "cut": (lambda: cut(triangle, 2), 4, 0.5),
    "repeat": (lambda: repeat(cut(triangle, 4)), 6, 0.5),
    "restarts": (lambda: restarts(cut(triangle, 4), decay=0.5), 6, 0.25),
    "cooldown": (lambda: cooldown(triangle, at=2, steps=4), 3, 0.25),
    "rescale": (lambda: rescale(triangle, old_batch=1, new_batch=2), 1, 0.5),
    "a-number": (lambda: warmup(2.0, steps=4), 2, 1.0),
}


@pytest.mark.parametrize(("build", "step", "expected"), ACCEPTING.values(), ids=ACCEPTING)
def test_every_combinator_takes_a_callable(build: Callable[[], Schedule], step: float, expected: float) -> None:
    assert build()(step) == expected


def test_a_callable_has_a_name_and_cannot_be_rebuilt_from_it() -> None:
    plain = json.loads(json.dumps((warmup(triangle, steps=4)).to_dict()))
    assert plain["parts"][1] == {"kind": "function", "name": f"{__name__}.triangle"}
    with pytest.raises(ScheduleError, match=r"triangle' is a callable of which only the name was saved; pass the call"):
        Schedule.from_dict(plain)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda step: math.nan, r"<lambda>\(3\) returned nan, which is not a finite number"),
        (lambda step: math.inf, r"<lambda>\(3\) returned inf, which is not a finite number"),
        (lambda step: None, r"<lambda>\(3\) must return a number"),
        (lambda: 1.0, r"<lambda>\(3\) must return a number: .* takes 0 positional arguments"),
        (linear, r"linear\(3\) must return a number: .*missing"),
    ],
    ids=["nan", "inf", "nothing", "no-argument", "a-curve-that-was-not-built"],
)
def test_a_callable_that_gives_no_finite_number_is_refused(function: Callable[[float], float], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        as_schedule(function)(3)


@pytest.mark.parametrize("given", ["cosine", None, {"kind": "constant"}, True])
def test_what_is_no_schedule_is_refused(given: object) -> None:
    with pytest.raises(ScheduleError, match="must be a Schedule, a number, or a callable that takes the step"):
        as_schedule(given)


def test_an_operand_of_another_type_is_a_type_error() -> None:
    for operate in (lambda: FALL * "2", lambda: FALL + None, lambda: [1] - FALL, lambda: FALL - True):  # type: ignore[operator]
        with pytest.raises((TypeError, ScheduleError)):
            operate()
    with pytest.raises(ScheduleError, match="divided by a number other than 0, not by 0"):
        FALL / 0
