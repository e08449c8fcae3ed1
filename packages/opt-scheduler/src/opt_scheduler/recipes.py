"""Well-known schedules made of curves, and every schedule by name, for runs described by a configuration file."""

from collections.abc import Sequence
from functools import partial
from inspect import Parameter
from itertools import pairwise
from typing import Any

from .compose import followed, join, repeat, restarts
from .curves import NAMED, constant, linear, named, piecewise_linear, ramp
from .errors import ScheduleError, check_number, check_optional, unknown_name
from .schedule import Schedule, ScheduleLike, as_schedule


def warmup(schedule: ScheduleLike, *, steps: float, start: float = 0.0, shape: str = "linear") -> Schedule:
    """Rise from `start` to the first value of `schedule` over `steps`, then follow `schedule` from its own step 0.

    With `start=0` the update at step 0 changes nothing; `start=peak / steps` avoids that. `steps=0` adds no warmup.

    >>> from opt_scheduler import linear
    >>> warmup(linear(1.0, 0.0, steps=10), steps=4).values([0, 1, 2, 3, 4, 5, 14])
    [0.0, 0.25, 0.5, 0.75, 1.0, 0.9, 0.0]
    """
    check_number("warmup", low=0, steps=steps)
    curve = as_schedule(schedule)
    if steps <= 0:
        return curve
    return join(ramp(start, curve(0), steps=steps, shape=shape), curve)


def cooldown(
    schedule: ScheduleLike, *, at: float, steps: float, end: float = 0.0, shape: str = "minus_sqrt"
) -> Schedule:
    """Follow `schedule` until step `at`, then go from its value there down to `end` over `steps`.

    This branches a finished model off a run that continues with `schedule`.

    >>> from opt_scheduler import constant
    >>> cooldown(constant(1.0), at=1000, steps=100).values([999, 1000, 1025, 1100])
    [1.0, 1.0, 0.5, 0.0]
    """
    check_number("cooldown", low=0, at=at)
    check_number("cooldown", above=0, steps=steps)
    tail = ramp(as_schedule(schedule)(at), end, steps=steps, shape=shape)
    return followed(schedule, tail, at=at)


@named("wsd")
def wsd(
    peak: float,
    *,
    decay_steps: float,
    steps: float | None = None,
    warmup_steps: float = 0,
    stable_steps: float | None = None,
    start: float = 0.0,
    end: float = 0.0,
    shape: str = "minus_sqrt",
) -> Schedule:
    """Warm up, stay stable, decay (https://arxiv.org/abs/2404.06395). `repeat` or `join` several of them for WSD-S.

    Pass the length of all three as `steps`, or that of the stable phase as `stable_steps`.

    >>> wsd(1.0, steps=100, warmup_steps=10, decay_steps=20, shape="linear").values([5, 10, 80, 90, 100])
    [0.5, 1.0, 1.0, 0.5, 0.0]

    Raises:
        ScheduleError: neither or both of `steps` and `stable_steps` are given; `decay_steps` is not above 0;
            `warmup_steps` or `stable_steps` is below 0; or the phases are longer than `steps`.
    """
    check_number("wsd", low=0, warmup_steps=warmup_steps)
    check_number("wsd", above=0, decay_steps=decay_steps)
    check_optional("wsd", low=0, stable_steps=stable_steps)
    check_optional("wsd", above=0, steps=steps)
    if (steps is None) == (stable_steps is None):
        raise ScheduleError(f"wsd: pass either steps or stable_steps, not {steps=} and {stable_steps=}")
    if stable_steps is None:
        stable_steps = steps - warmup_steps - decay_steps  # type: ignore[operator]
        if stable_steps < 0:
            raise ScheduleError(
                f"wsd: decay_steps={decay_steps!r} must fit after the warmup: steps - warmup_steps is "
                f"{decay_steps + stable_steps!r}"
            )
    stable = [constant(peak, steps=stable_steps)] if stable_steps > 0 else []
    falling = join(*stable, ramp(peak, end, steps=decay_steps, shape=shape))
    return warmup(falling, steps=warmup_steps, start=start)


@named("one_cycle")
def one_cycle(
    peak: float,
    *,
    up_steps: float,
    down_steps: float,
    start: float | None = None,
    end: float = 0.0,
    shape: str = "cosine",
) -> Schedule:
    """Rise once to `peak` and fall once (https://arxiv.org/abs/1708.07120). `start` is peak / 25 by default.

    torch's OneCycleLR(total_steps=T, pct_start=p) is up_steps=p·T - 1, down_steps=T - p·T, end=start / 1e4.

    >>> [round(v, 6) for v in one_cycle(1.0, up_steps=30, down_steps=70).values([0, 30, 65, 100])]
    [0.04, 1.0, 0.5, 0.0]
    """
    check_number("one_cycle", peak=peak)
    check_number("one_cycle", above=0, up_steps=up_steps, down_steps=down_steps)
    first = peak / 25 if start is None else start
    return join(ramp(first, peak, steps=up_steps, shape=shape), ramp(peak, end, steps=down_steps, shape=shape))


@named("cyclic")
def cyclic(low: float, high: float, *, up_steps: float, down_steps: float, times: int | None = None) -> Schedule:
    """Repeat triangles between two values (https://arxiv.org/abs/1506.01186), `times` of them, or forever.

    >>> cyclic(0.0, 1.0, up_steps=2, down_steps=4).values([0, 1, 2, 4, 6, 7])
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.5]
    """
    check_number("cyclic", above=0, up_steps=up_steps, down_steps=down_steps)
    return repeat(join(linear(low, high, steps=up_steps), linear(high, low, steps=down_steps)), times=times)


@named("piecewise_constant")
def piecewise_constant(values: Sequence[float], *, at: Sequence[float]) -> Schedule:
    """Keep `values[0]` until step `at[0]`, then `values[1]` until step `at[1]`, and so on.

    >>> piecewise_constant([1.0, 0.1, 0.01], at=[100, 150]).values([0, 99, 100, 149, 150])
    [1.0, 1.0, 0.1, 0.1, 0.01]
    """
    if not (isinstance(values, Sequence) and isinstance(at, Sequence)):
        raise ScheduleError(f"piecewise_constant: {values=} and {at=} must be lists or tuples of numbers")
    check_number("piecewise_constant", **{f"values[{index}]": value for index, value in enumerate(values)})
    check_number("piecewise_constant", **{f"at[{index}]": step for index, step in enumerate(at)})
    edges = [0.0, *at]
    if len(values) != len(edges):
        raise ScheduleError(
            f"piecewise_constant: at={list(at)!r} has {len(at)} steps, at which {len(at) + 1} values meet, but there "
            f"are {len(values)} values"
        )
    if any(b <= a for a, b in pairwise(edges)):
        raise ScheduleError(f"piecewise_constant: at={list(at)!r} must ascend from above 0")
    lengths = [b - a for a, b in pairwise(edges)]
    parts = [constant(value, steps=steps) for value, steps in zip(values, lengths, strict=False)]
    return join(*parts, constant(values[-1]))


@named("step_decay")
def step_decay(start: float, *, factor: float, every: float, times: int) -> Schedule:
    """Multiply `start` by `factor` after every `every` steps, `times` times in all.

    >>> step_decay(1.0, factor=0.5, every=10, times=2).values([0, 9, 10, 20, 1000])
    [1.0, 1.0, 0.5, 0.25, 0.25]
    """
    check_number("step_decay", start=start, factor=factor)
    check_number("step_decay", low=1, times=times)
    check_number("step_decay", above=0, every=every)
    if not isinstance(times, int):
        raise ScheduleError(f"step_decay: times={times!r} must be a whole number")
    values = [start * factor**i for i in range(times + 1)]
    return piecewise_constant(values, at=[every * (i + 1) for i in range(times)])


@named("cosine_restarts", has_warmup=True)
def _cosine_restarts(
    peak: float, *, steps: float, end: float = 0.0, cycles: int = 1, t_mult: float = 1.0, decay: float = 1.0
) -> Schedule:
    check_number("cosine_restarts", low=1, cycles=cycles)
    check_number("cosine_restarts", above=0, t_mult=t_mult)
    periods = cycles if t_mult == 1 else (t_mult**cycles - 1) / (t_mult - 1)
    period = ramp(peak, end, steps=steps / periods, shape="cosine")
    if t_mult == decay == 1:
        return repeat(period, times=cycles)
    return restarts(period, times=cycles, t_mult=t_mult, decay=decay)


@named("piecewise_linear")
def _linear_between(*, points: Sequence[Sequence[float]]) -> Schedule:
    try:
        rows = [tuple(point) for point in points]
    except TypeError:
        raise ScheduleError(f"piecewise_linear: {points=} must be a list of (step, value) points") from None
    return piecewise_linear(*rows)  # type: ignore[arg-type]


@named("WarmupLR")
def _warmup_lr(
    *,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: float = 1000,
    warmup_type: str = "log",
) -> Schedule:
    """Follow DeepSpeed's `WarmupLR`: the value at step n is its learning rate at `last_batch_iteration` n."""
    return warmup(warmup_max_lr, steps=max(2, warmup_num_steps), start=warmup_min_lr, shape=warmup_type)


@named("WarmupDecayLR")
def _warmup_decay_lr(
    *,
    total_num_steps: float,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: float = 1000,
    warmup_type: str = "log",
) -> Schedule:
    """Follow DeepSpeed's `WarmupDecayLR`: a line back to `warmup_min_lr` after the warmup."""
    rising_steps = max(2, warmup_num_steps)
    check_number("WarmupDecayLR", above=rising_steps, total_num_steps=total_num_steps)
    falling = linear(warmup_max_lr, warmup_min_lr, steps=total_num_steps - rising_steps)
    return warmup(falling, steps=rising_steps, start=warmup_min_lr, shape=warmup_type)


@named("torchtitan")
def _torchtitan(
    peak: float,
    *,
    steps: int,
    warmup_steps: int = 200,
    decay_ratio: float | None = None,
    decay_type: str = "linear",
    min_lr_factor: float = 0.0,
) -> Schedule:
    """Follow torchtitan's schedule: its warmup counts from 1, so step n has (n + 1) / warmup_steps of `peak`.

    As there, a decay that does not fit after the warmup is shortened.
    """
    check_number("torchtitan", peak=peak, min_lr_factor=min_lr_factor)
    check_optional("torchtitan", decay_ratio=decay_ratio)
    check_number("torchtitan", low=0, warmup_steps=warmup_steps)
    check_number("torchtitan", above=warmup_steps, steps=steps)
    left = steps - warmup_steps
    decay_steps = left if decay_ratio is None else min(round(steps * decay_ratio), left)
    shape = "minus_sqrt" if decay_type == "sqrt" else decay_type
    first = peak / max(warmup_steps, 1)
    rising_steps = max(warmup_steps - 1, 0)
    low = peak * min_lr_factor
    return wsd(peak, steps=steps, warmup_steps=rising_steps, decay_steps=decay_steps, start=first, end=low, shape=shape)


_TRANSFORMERS_NAMES = {  # of HF transformers, for the same curves
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine_restarts",
    "warmup_stable_decay": "wsd",
}
SCHEDULE_NAMES = (*sorted(NAMED, key=str.lower), *sorted(_TRANSFORMERS_NAMES))
NAMED.update((alias, NAMED[name]) for alias, name in _TRANSFORMERS_NAMES.items())
NAMED["warmup_stable_decay"] = NAMED["wsd"]._replace(build=partial(wsd, shape="cosine"))


def get_schedule(name: str, **arguments: Any) -> Schedule:
    """Build a schedule from its name and arguments, such as a configuration file holds.

    Most names take `peak`, `steps`, `warmup_steps` (0), `start` (0) and options: a warmup from `start` to `peak`, then
    the curve, which ends at step `steps`. `steps` counts from step 0 and contains the warmup. The recipes cyclic,
    one_cycle, piecewise_constant, piecewise_linear, step_decay and wsd take the arguments of their functions.
    `schedule_signatures()` lists the arguments of every name. The names of HF transformers for the same curves work
    too: constant_with_warmup, cosine_with_min_lr, cosine_with_restarts and warmup_stable_decay. WarmupLR and
    WarmupDecayLR take the parameters of DeepSpeed's schedulers, torchtitan those of its section `lr_scheduler`.

    >>> get_schedule("cosine", peak=1e-3, steps=110, warmup_steps=10, end=1e-4).values([0, 10, 60, 110])
    [0.0, 0.001, 0.00055, 0.0001]
    >>> get_schedule(**{"name": "wsd", "peak": 1.0, "steps": 100, "decay_steps": 20, "shape": "linear"})(90)
    0.5
    >>> get_schedule("piecewise_constant", values=[1.0, 0.1], at=[30]).values([29, 30])
    [1.0, 0.1]

    Raises:
        ScheduleError: an unknown name or argument, a missing one, or a value out of range.
    """
    if name not in SCHEDULE_NAMES:
        raise ScheduleError(unknown_name("schedule", name, SCHEDULE_NAMES))
    found = NAMED[name]
    known = found.arguments()
    for argument in arguments:
        if argument not in known:
            raise ScheduleError(unknown_name(f"{name}: argument", argument, known))
    missing = [key for key, default in known.items() if default is Parameter.empty and key not in arguments]
    if missing:
        raise ScheduleError(f"{name}: {' and '.join(missing)} must be given")
    given = {key: value for key, value in arguments.items() if value is not None or known[key] is not None}
    amounts = {key: amount for key, amount in given.items() if key.endswith("steps")}
    check_number(name, low=0, **amounts)
    for key, amount in amounts.items():
        if 0 < amount < 1:
            raise ScheduleError(
                f"{name}: {key}={amount!r} is less than a step; for a fraction of the run, pass {amount!r} * steps"
            )
    if not found.has_warmup:
        return found.build(**arguments)
    arguments = found.defaults | arguments
    peak, steps, warmup_steps, start = (arguments.pop(key, 0) for key in ("peak", "steps", "warmup_steps", "start"))
    check_number(name, above=0, steps=steps)
    check_number(name, peak=peak, start=start)
    if warmup_steps >= steps:
        raise ScheduleError(f"{name}: {warmup_steps=} must be less than {steps=}, which include it")
    if "timescale" in known and arguments["timescale"] is None:
        arguments["timescale"] = warmup_steps or 10_000
    curve = found.build(peak, steps=steps - warmup_steps, **arguments)
    return warmup(curve, steps=warmup_steps, start=start)


def schedule_signatures() -> dict[str, str]:
    """Return the arguments of every name that `get_schedule` takes, with their defaults.

    >>> schedule_signatures()["cosine"]
    'peak, steps, warmup_steps=0, start=0.0, end=0.0'
    """
    signatures = {}
    for name in SCHEDULE_NAMES:
        known = NAMED[name].arguments()
        shown = [key if default is Parameter.empty else f"{key}={default!r}" for key, default in known.items()]
        signatures[name] = ", ".join(shown)
    return signatures
