"""Curves and combinators: their knots, what holds for every schedule there is, and what cannot be one."""

import dataclasses
import gc
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opt_scheduler import (
    OptimizerParamScheduler,
    Schedule,
    ScheduleError,
    as_schedule,
    clip,
    constant,
    cooldown,
    cosine,
    cut,
    cyclic,
    exponential,
    extend,
    get_schedule,
    inverse_sqrt,
    join,
    linear,
    minus_sqrt,
    one_cycle,
    piecewise_constant,
    piecewise_linear,
    polynomial,
    power,
    ramp,
    repeat,
    rescale,
    restarts,
    scale,
    shift,
    shifted_exponential,
    step_decay,
    stretch,
    warmup,
    wsd,
)
from opt_scheduler.shapes import SHAPES

MEGATRON = OptimizerParamScheduler(
    SimpleNamespace(param_groups=[]),
    init_lr=0.0,
    max_lr=1.0,
    min_lr=0.5,
    lr_warmup_steps=2,
    lr_decay_steps=12,
    lr_decay_style="WSD",
    wsd_decay_steps=4,
    lr_wsd_decay_style="linear",
    start_wd=0.0,
    end_wd=0.0,
    wd_incr_steps=0,
    wd_incr_style="constant",
)
FALL = linear(1.0, 0.0, steps=4)
WAVE = as_schedule(lambda n: math.cos(math.pi * n / 2))
WSD = wsd(1.0, steps=10, warmup_steps=2, decay_steps=4, shape="linear")
RISE = piecewise_constant([1.0, 2.0], at=[5])
JUMP = cut(RISE, 5)
# name: schedule, {step: value known from the formula, worked out by hand or with a calculator}
KNOTS: dict[str, tuple[Schedule, dict[float, float]]] = {
    "constant": (constant(0.3), {0: 0.3, 7.5: 0.3, 1e12: 0.3}),
    "linear": (linear(2.0, 1.0, steps=10), {0: 2.0, 2.5: 1.75, 10: 1.0, 11: 1.0}),
    "cosine": (cosine(1.0, 0.0, steps=9), {0: 1.0, 3: 0.75, 6: 0.25, 9: 0.0, 18: 0.0}),
    "cosine-up": (cosine(0.0, 1.0, steps=9), {0: 0.0, 3: 0.25, 9: 1.0}),
    "minus-sqrt": (minus_sqrt(1.0, 0.0, steps=100), {0: 1.0, 1: 0.9, 81: 0.1, 100: 0.0}),
    "minus-square": (ramp(1.0, 0.0, steps=10, shape="minus_square"), {0: 1.0, 5: 0.75, 10: 0.0}),
    "shifted-exponential": (shifted_exponential(1.0, 0.0, steps=2), {0: 1.0, 1: math.sqrt(2) - 1, 2: 0.0}),
    "exponential": (exponential(1.0, 1e-4, steps=40), {0: 1.0, 10: 0.1, 20: 0.01, 40: 1e-4, 41: 1e-4}),
    "polynomial": (polynomial(1.0, 0.2, steps=10, power=3), {0: 1.0, 5: 0.3, 10: 0.2, 99: 0.2}),
    "power": (power(1.0, exponent=-0.5, timescale=3), {0: 1.0, 9: 0.5, 45: 0.25}),
    "inverse-sqrt-ends": (inverse_sqrt(1.0, timescale=10, steps=30), {0: 1.0, 30: 0.5, 1000: 0.5}),
    "piecewise-linear": (piecewise_linear((0, 0.0), (2, 1.0), (4, 0.0)), {0: 0.0, 1: 0.5, 2: 1.0, 3: 0.5, 5: 0.0}),
    "piecewise-constant": (piecewise_constant([3.0, 2.0, 1.0], at=[5, 7]), {0: 3, 4.9: 3, 5: 2, 7: 1, 8: 1}),
    "step-decay": (step_decay(1.0, factor=0.1, every=3, times=2), {0: 1, 2: 1, 3: 0.1, 6: 0.01, 60: 0.01}),
    "warmup": (warmup(constant(1.0), steps=4), {0: 0.0, 1: 0.25, 4: 1.0, 5: 1.0}),
    "warmup-of-nothing": (warmup(FALL, steps=0), {0: 1.0, 4: 0.0}),
    "log": (ramp(1.0, 3.0, steps=8, shape="log"), {0: 1.0, 1: 1 + 2 / 3, 3: 1 + 4 / 3, 7: 3.0, 8: 3.0, 9: 3.0}),
    "join": (join(linear(0.0, 1.0, steps=2), constant(5.0, steps=2), constant(7.0)), {1: 0.5, 2: 5, 3.9: 5, 4: 7}),
    "join-hides-a-jump": (join(JUMP, constant(1.0)), {4.9: 1.0, 5: 1.0, 6: 1.0}),
    "repeat": (repeat(FALL, times=2), {0: 1.0, 3: 0.25, 4: 1.0, 7: 0.25, 8: 0.0, 100: 0.0}),
    "repeat-for-ever": (repeat(FALL), {4_000_001: 0.75}),
    "cyclic": (cyclic(1.0, 3.0, up_steps=2, down_steps=2, times=2), {0: 1, 2: 3, 4: 1, 6: 3, 8: 1, 9: 1}),
    "one-cycle": (one_cycle(1.0, up_steps=3, down_steps=9, end=0.1), {0: 0.04, 3: 1.0, 12: 0.1, 13: 0.1}),
    "restarts": (
        restarts(FALL, times=3, t_mult=2, decay=0.5),
        {0: 1.0, 3: 0.25, 4: 0.5, 8: 0.25, 11: 0.0625, 12: 0.25, 20: 0.125, 28: 0.0, 99: 0.0},
    ),
    "restarts-decay-only": (restarts(FALL, decay=0.5), {0: 1.0, 3: 0.25, 4: 0.5, 7: 0.125, 8: 0.25, 41: 0.75 / 1024}),
    "restarts-shrink": (
        restarts(
            cut(linear(1.0, 0.0, steps=12) * piecewise_constant([3.0, 2.0, 1.0], at=[4, 8]), 12), times=2, t_mult=0.5
        ),
        {0: 3.0, 6: 1.0, 12: 3.0, 15: 1.0, 18: 0.0, 19: 0.0},
    ),
    "restarts-end-in-a-jump": (restarts(JUMP, times=2, t_mult=3), {4: 1.0, 5: 1.0, 19: 1.0, 20: 2.0}),
    "sum": (FALL + constant(0.5) + 1, {0: 2.5, 2: 2.0, 9: 1.5}),
    "difference": (2 - FALL - constant(0.5), {0: 0.5, 2: 1.0, 4: 1.5}),
    "product": (FALL * piecewise_constant([1.0, 3.0], at=[2]), {1: 0.75, 2: 1.5, 3: 0.75, 5: 0}),
    "jumps-cancel": (RISE + piecewise_constant([2.0, 1.0], at=[5]), {4: 3.0, 5: 3.0, 6: 3.0}),
    "scaled-by-operators": (-(FALL * 10) / 4, {0: -2.5, 1: -1.875, 4: 0.0}),
    "scale": (scale(FALL, 10), {1: 7.5}),
    "clip": (clip(linear(1.0, 0.0, steps=10), low=0.25, high=0.75), {0: 0.75, 5: 0.5, 9: 0.25}),
    "shift-later": (shift(FALL, 2), {0: 1.0, 2: 1.0, 4: 0.5, 6: 0.0}),
    "shift-earlier": (shift(FALL, -2), {0: 0.5, 2: 0.0}),
    "stretch": (stretch(FALL, 2.5), {5: 0.5, 10: 0.0}),
    "cut": (cut(FALL, 1), {0.5: 0.875, 1: 0.75, 4: 0.75}),
    "cooldown": (cooldown(linear(1.0, 0.0, steps=10), at=5, steps=4), {5: 0.5, 6: 0.25, 9: 0.0}),
    "wsd": (wsd(1.0, warmup_steps=2, stable_steps=4, decay_steps=4), {1: 0.5, 2: 1, 6: 1, 7: 0.5, 10: 0}),
    "wsd-at-once": (wsd(1.0, steps=6, warmup_steps=2, decay_steps=4, shape="linear"), {0: 0, 2: 1, 4: 0.5, 6: 0}),
    "wsd-s": (
        repeat(wsd(1.0, warmup_steps=2, stable_steps=4, decay_steps=4, end=0.5), times=3),
        {9: 1 - 0.5 * math.sqrt(0.75), 10: 0.0, 12: 1.0, 30: 0.5},
    ),
    "extend": (extend(linear(1.0, 0.0, steps=8), at=4, steps=12), {4: 0.5, 8: 0.25, 12: 0.0}),
    "extend-stretches-the-decay": (extend(WSD, at=4, steps=16, stretch_decay=True), {4: 1.0, 8: 1.0, 12: 0.5, 16: 0.0}),
    "extend-keeps-the-decay": (extend(WSD, at=4, steps=20), {1: 0.5, 4: 1, 16: 1, 17: 0.75, 18: 0.5, 20: 0, 21: 0}),
    "extend-at-the-plateaus-end": (extend(WSD, at=6, steps=12), {6: 1, 8: 1, 9: 0.75, 12: 0}),
    "extend-at-the-plateaus-start": (extend(WSD * 2, at=2, steps=12), {1: 1, 2: 2, 8: 2, 9: 1.5, 12: 0}),
    "extend-without-warmup": (
        extend(wsd(1.0, stable_steps=2, decay_steps=4, shape="linear"), at=0, steps=9),
        {0: 1, 5: 1, 7: 0.5},
    ),
    "extend-to-the-same-end": (extend(WSD, at=8, steps=10), {6: 1.0, 8: 0.5, 10: 0.0}),
    "extend-megatron": (extend(MEGATRON.lr_schedule(), at=8, steps=16), {2: 1, 12: 1, 14: 0.75, 16: 0.5}),
    "deepspeed": (
        get_schedule("WarmupDecayLR", total_num_steps=12, warmup_num_steps=8, warmup_max_lr=3.0),
        {0: 0.0, 1: 1.0, 3: 2.0, 7: 3.0, 8: 3.0, 10: 1.5, 12: 0.0},
    ),
    "torchtitan": (
        get_schedule("torchtitan", peak=1.0, steps=12, warmup_steps=4, decay_ratio=0.25),
        {0: 0.25, 2: 0.75, 3: 1.0, 9: 1.0, 10: 2 / 3, 12: 0.0},
    ),
    "megatron": (MEGATRON.lr_schedule(), {0: 0.0, 1: 0.5, 2: 1.0, 8: 1.0, 10: 0.75, 12: 0.5}),
    "rescale": (rescale(linear(1.0, 0.0, steps=8), old_batch=1, new_batch=2, done=4), {4: 0.5, 5: 0.25, 6: 0.0}),
}
ALL = [pytest.param(schedule, id=name) for name, (schedule, _) in KNOTS.items()]


def triangle(step: float) -> float:
    """A function of the step as users write it."""
    return 1.0 - abs(step - 4) / 4


OF_CALLABLES: dict[str, tuple[Schedule, dict[float, float]]] = {  # as above, but from_dict does not give them back
    "callable-after-operators": ((FALL - triangle) * triangle + triangle, {1: 0.375}),
    "callable-before-operators": (triangle + triangle * (triangle - FALL), {1: 0.125}),
    "callable-in-join": (join(constant(2.0, steps=4), triangle), {6: 0.5}),
    "callable-in-warmup": (warmup(lambda step: 2.0 + step, steps=4), {2: 1.0}),
    "callable-in-scale": (scale(triangle, 2), {2: 1.0}),
    "callable-in-clip": (clip(triangle, low=0.75), {2: 0.75}),
    "callable-in-shift": (shift(triangle, 2), {4: 0.5}),
    "callable-in-stretch": (stretch(triangle, 2), {4: 0.5}),
    "callable-in-cut": (cut(triangle, 2), {4: 0.5}),
    "callable-in-repeat": (repeat(cut(triangle, 4)), {6: 0.5}),
    "callable-in-restarts": (restarts(cut(triangle, 4), decay=0.5), {6: 0.25}),
    "callable-in-cooldown": (cooldown(triangle, at=2, steps=4), {3: 0.25}),
    "callable-in-rescale": (rescale(triangle, old_batch=1, new_batch=2), {1: 0.5}),
    "number-in-warmup": (warmup(2.0, steps=4), {2: 1.0}),
    # Five periods of a cosine passed for a constant phase.
    "extend-stretches-a-wave": (extend(cut(WAVE, 20), at=4, steps=36), {2: -1.0, 4: 1.0, 8: -1.0, 12: 1.0, 36: 1.0}),
}


@pytest.mark.parametrize(
    ("schedule", "knots"), [pytest.param(*case, id=name) for name, case in (KNOTS | OF_CALLABLES).items()]
)
def test_it_passes_through_its_points(schedule: Schedule, knots: dict[float, float]) -> None:
    # A handful of float operations: 8 rounding units are ample.
    assert schedule.values(knots) == pytest.approx(list(knots.values()), rel=2e-15, abs=2e-15)


@pytest.mark.parametrize("schedule", ALL)
def test_values_are_constant_before_the_start_and_after_the_end(schedule: Schedule) -> None:
    assert schedule(-1) == schedule(-1e9) == schedule(0)
    if math.isfinite(schedule.length):
        assert schedule(schedule.length + 1) == schedule(schedule.length * 2 + 1e6) == schedule(schedule.length)


@pytest.mark.parametrize("schedule", ALL)
def test_it_is_a_value_that_plain_types_give_back(schedule: Schedule) -> None:
    back = Schedule.from_dict(json.loads(json.dumps(schedule.to_dict(), allow_nan=False)))
    assert back == schedule
    assert hash(back) == hash(schedule)
    with pytest.raises(AttributeError):
        setattr(schedule, dataclasses.fields(schedule)[0].name, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ALL)
def test_the_boundaries_ascend_to_the_end(schedule: Schedule) -> None:
    assert list(schedule.boundaries) == sorted(set(schedule.boundaries))
    assert not schedule.boundaries or math.isinf(schedule.length) or schedule.boundaries[-1] == schedule.length


@pytest.mark.parametrize("shape", SHAPES)
@given(r=st.floats(0, 1), s=st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_a_shape_falls_from_one_to_zero_and_never_rises(shape: str, r: float, s: float) -> None:
    f: Callable[[float], float] = SHAPES[shape]
    assert (f(0.0), f(1.0)) == (1.0, 0.0)
    assert f(min(r, s)) >= f(max(r, s)) - 1e-15  # one rounding unit
    assert 0.0 <= f(r) <= 1.0


def test_a_kind_of_ones_own_takes_part_and_says_what_arrays_need() -> None:
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Sawtooth(Schedule):
        kind: ClassVar[str] = "sawtooth"
        period: int

        def at(self, step: float) -> float:
            return step % self.period

        @property
        def length(self) -> float:
            return math.inf

        @property
        def boundaries(self) -> tuple[float, ...]:
            return (self.period,)

    mine = cut(Sawtooth(period=3), 10)
    assert Schedule.from_dict(mine.to_dict()) == mine
    assert mine(7) == 1
    assert (mine * 2 + constant(1.0))(7) == 3
    numpy = pytest.importorskip("numpy", minversion="2.1")
    with pytest.raises(ScheduleError, match=r"Sawtooth has no array_at\(step, xp\).* define it, or call values\(\)"):
        mine(numpy.arange(3))


def test_a_formula_may_use_the_functions_of_an_array_library() -> None:
    """One with `exp` failed: 'types.SimpleNamespace' object has no attribute 'exp'."""

    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Wave(Schedule):
        kind: ClassVar[str] = "wave"
        length: ClassVar[float] = math.inf  # type: ignore[misc]
        boundaries: ClassVar[tuple[float, ...]] = ()  # type: ignore[misc]

        def array_at(self, step: Any, xp: Any) -> Any:
            rising = xp.log(1.0 + step) * xp.tanh(step / xp.e) * xp.abs(xp.sin(step)) + xp.floor(xp.sqrt(step))
            return xp.exp(-step / 9.0) * xp.clip(rising, 0.5, 2.0) + xp.log2(2.0 + xp.cos(xp.pi * step))

    steps = [0.0, 0.5, 3.0, 40.0]
    values = [Wave()(step) for step in steps]
    assert values[0] == 0.5 + math.log2(3.0)
    numpy = pytest.importorskip("numpy", minversion="2.1")
    assert Wave()(numpy.array(steps)) == pytest.approx(values, rel=1e-14)


def test_two_classes_of_one_kind_are_refused() -> None:
    other = type("Other", (type(constant(1.0)),), {"kind": "constant"})
    with pytest.raises(ScheduleError, match=r"two schedules have the kind 'constant': .*Constant.*Other.*; rename one"):
        Schedule.from_dict(constant(1.0).to_dict())
    del other
    gc.collect()  # a class stays among the subclasses of its base until it is freed


@pytest.mark.parametrize("schedule", ALL)
def test_an_array_of_steps_gives_the_value_of_each(schedule: Schedule) -> None:
    numpy = pytest.importorskip("numpy", minversion="2.1")  # the first whose arrays have the array API
    steps = [-3, 0, *range(1, 45), 1000, 4_000_001]
    peak = max(map(abs, schedule.values(steps)))
    for array in (numpy.array(steps), numpy.array(steps, float), numpy.array([[3.25, 7.5], [0.125, 11.75]])):
        values = schedule(array)
        assert (values.shape, values.dtype) == (array.shape, float)
        # NumPy's cosine and power may differ from those of `math` in the last place.
        assert values.ravel() == pytest.approx(schedule.values(array.ravel().tolist()), rel=1e-13, abs=1e-13 * peak)


@pytest.mark.parametrize("schedule", ALL)
def test_jax_traces_it(schedule: Schedule) -> None:
    # optax calls a schedule with a traced count, which was answered with TracerBoolConversionError.
    jax = pytest.importorskip("jax")
    steps = [0, *range(1, 45), 1000, 4_000_001]
    values = jax.jit(jax.vmap(schedule))(jax.numpy.array(steps))
    expected = schedule.values(steps)
    # float32: a few of its rounding units, of the largest value where two nearly equal ones are subtracted.
    assert values == pytest.approx(expected, rel=1e-5, abs=1e-6 * max(map(abs, expected)))


def test_jax_counts_large_steps_exactly() -> None:
    # In float32, 2**24 + 1 is 2**24: the step at which a phase begins was one off.
    jax = pytest.importorskip("jax")
    start = 2**24 + 1
    schedule = join(constant(1.0, steps=start), linear(8.0, 0.0, steps=4))
    assert jax.jit(jax.vmap(schedule))(jax.numpy.array([start - 1, start, start + 1])).tolist() == [1.0, 8.0, 6.0]


def test_unsigned_and_short_steps_do_not_wrap() -> None:
    numpy = pytest.importorskip("numpy", minversion="2.1")
    schedule = shift(linear(1.0, 0.0, steps=1000), 500)
    for dtype in (numpy.uint32, numpy.uint8, numpy.int8, numpy.float16):
        assert schedule(numpy.array([0, 100], dtype)).tolist() == [1.0, 1.0]


def test_rounding_does_not_move_a_restart_to_another_step() -> None:
    for t_mult in (3.0, 1.1, 1.5, 7.0, 1.01, 2.3):
        schedule: Any = restarts(linear(1.0, 0.0, steps=5), t_mult=t_mult)
        for period in range(18):
            start = schedule.start_of(period)
            assert schedule(start) == 1.0
            assert schedule(math.nextafter(start, math.inf)) == pytest.approx(1.0)
            assert period == 0 or 0 <= schedule(math.nextafter(start, 0.0)) < 1e-9


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
    # WSD: a longer run stretched its decay without a word.
    "extend: at=8 must be a step of the constant phase, which becomes longer until steps=16; stretch_decay=True": (
        lambda: extend(WSD, at=8, steps=16)
    ),
    "extend: at=1 must be a step of the constant phase": lambda: extend(WSD, at=1, steps=16),
    "extend: at=4 must be a step of the constant phase": lambda: extend(WSD, at=4, steps=9),
    "extend: at=10 must be a step of the constant phase": lambda: extend(MEGATRON.lr_schedule(), at=10, steps=16),
    "piecewise_linear: points=((0,),) must be (step, value) pairs": (
        lambda: get_schedule("piecewise_linear", points=[(0,)])
    ),
    "ramp: shape='logarithm' is not known": lambda: get_schedule("WarmupLR", warmup_type="logarithm"),
    "ramp: steps=1 must be at least 2": lambda: ramp(0.0, 1.0, steps=1, shape="log"),
    "WarmupDecayLR: total_num_steps=900 must be more than 1000": (
        lambda: get_schedule("WarmupDecayLR", total_num_steps=900)
    ),
    "ramp: shape='cosin' is not known: use one of 'cosine', 'exponential', 'linear', 'log'": (
        lambda: get_schedule("torchtitan", peak=1.0, steps=9, warmup_steps=2, decay_type="cosin")
    ),
    "torchtitan: steps=9 must be more than 200": (lambda: get_schedule("torchtitan", peak=1.0, steps=9)),
    "torchtitan: warmup_steps=-2 must be at least 0": (
        lambda: get_schedule("torchtitan", peak=1.0, steps=9, warmup_steps=-2, decay_ratio=0.5)
    ),
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


@pytest.mark.parametrize("step", ["a", None, [1, 2], math.nan])
def test_a_step_that_is_no_number_is_refused(step: object) -> None:
    # NaN gave the end value; the others a TypeError about '>'.
    with pytest.raises(ScheduleError, match=r"^ramp: step="):
        linear(1.0, 0.0, steps=10)(step)  # type: ignore[arg-type]


def test_extend_lengthens_the_step_it_is_in() -> None:
    schedule = extend(cut(step_decay(1.0, factor=0.5, every=10, times=2), 30), at=10, steps=40)
    assert schedule.values([9, 10, 29, 30, 39, 40]) == [1.0, 0.5, 0.5, 0.25, 0.25, 0.25]


# ----- operators, and callables where a schedule is expected


def test_the_bracketing_does_not_matter() -> None:
    a = FALL
    b = constant(2.0)
    c = linear(0.0, 1.0, steps=3)
    assert (a * b) * c == a * (b * c)
    assert (a + b) + c == a + (b + c)
    assert join(join(a, c), b) == join(a, join(c, b)) == join(a, c, b)


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
