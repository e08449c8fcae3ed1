"""Schedules by name, for runs that are described by a configuration file."""

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any

from .compose import warmup
from .curves import constant, exponential, inverse_sqrt, polynomial, ramp
from .errors import ScheduleError, unknown_name
from .recipes import wsd
from .restarts import repeat, restarts
from .schedule import Schedule, check_number
from .shapes import SHAPES

# A builder takes the peak, the number of steps after the warmup, and the options of its name.


def _ramp(shape: str) -> Callable[..., Schedule]:
    def build(peak: float, *, steps: float, end: float = 0.0) -> Schedule:
        return ramp(peak, end, steps=steps, shape=shape)

    return build


def _polynomial(peak: float, *, steps: float, end: float = 0.0, power: float = 1.0) -> Schedule:
    return polynomial(peak, end, steps=steps, power=power)


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


def _wsd(peak: float, *, steps: float, decay_steps: float, end: float = 0.0, shape: str = "minus_sqrt") -> Schedule:
    check_number("wsd", above=0, decay_steps=decay_steps)
    if decay_steps > steps:
        raise ScheduleError(
            f"wsd: decay_steps={decay_steps!r} must fit after the warmup: steps - warmup_steps is {steps!r}"
        )
    stable = steps - decay_steps
    return wsd(peak, warmup_steps=0, stable_steps=stable, decay_steps=decay_steps, end=end, shape=shape)


_BUILDERS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        **{name: _ramp(name) for name in SHAPES if name != "exponential"},
        "constant": constant,
        "polynomial": _polynomial,
        "exponential": exponential,
        "shifted_exponential": _ramp("exponential"),
        "inverse_sqrt": inverse_sqrt,
        "cosine_restarts": _cosine_restarts,
        "wsd": _wsd,
    }
)
_ALIASES: Mapping[str, str] = MappingProxyType(
    {  # names of HF transformers for the same curves
        "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
        "cosine_with_restarts": "cosine_restarts",
        "warmup_stable_decay": "wsd",
    }
)
SCHEDULE_NAMES = (*sorted(_BUILDERS), *sorted(_ALIASES))


def get_schedule(
    name: str, *, peak: float, steps: float, warmup_steps: float = 0, start: float = 0.0, **options: Any
) -> Schedule:
    """Build a schedule from its name: a warmup from `start` to `peak`, then the curve, which ends at step `steps`.

    `steps` counts from step 0 and contains the warmup. Names, and the options of each:

    - constant; linear, cosine, minus_sqrt, minus_square, shifted_exponential: `end` (0)
    - exponential: `end`; polynomial: `end` (0), `power` (1)
    - inverse_sqrt: `timescale` (`warmup_steps`, or 10000 without a warmup)
    - cosine_restarts: `end` (0), `cycles` (1), `t_mult` (1), `decay` (1)
    - wsd: `decay_steps`, `end` (0), `shape` ("minus_sqrt")

    The names of HF transformers for these curves work too: constant_with_warmup, cosine_with_min_lr,
    cosine_with_restarts and warmup_stable_decay.

    >>> get_schedule("cosine", peak=1e-3, steps=110, warmup_steps=10, end=1e-4).values([0, 10, 60, 110])
    [0.0, 0.001, 0.00055, 0.0001]
    >>> get_schedule(**{"name": "wsd", "peak": 1.0, "steps": 100, "decay_steps": 20, "shape": "linear"})(90)
    0.5

    Raises:
        ScheduleError: an unknown name or option, a missing option, or a value out of range.
    """
    if name not in _BUILDERS and name not in _ALIASES:
        raise ScheduleError(unknown_name("schedule", name, SCHEDULE_NAMES))
    build = _BUILDERS[_ALIASES.get(name, name)]
    if build is inverse_sqrt and options.get("timescale") is None:
        options["timescale"] = warmup_steps or 10_000
    _check_options(name, build, options)
    check_number(name, above=0, steps=steps)
    check_number(name, low=0, warmup_steps=warmup_steps)
    check_number(name, peak=peak, start=start)
    if 0 < warmup_steps < 1:
        raise ScheduleError(
            f"{name}: warmup_steps={warmup_steps!r} is less than a step; for a fraction of the run, pass "
            f"warmup_steps={warmup_steps!r} * steps"
        )
    if warmup_steps >= steps:
        raise ScheduleError(
            f"{name}: warmup_steps={warmup_steps!r} must be less than steps={steps!r}, which include it"
        )
    return warmup(build(peak, steps=steps - warmup_steps, **options), steps=warmup_steps, start=start)


def _check_options(name: str, build: Callable[..., Schedule], options: Mapping[str, Any]) -> None:
    _, *parameters = signature(build).parameters.values()
    required = {each.name: each.default is Parameter.empty for each in parameters if each.name != "steps"}
    for option in options:
        if option not in required:
            raise ScheduleError(
                unknown_name(f"{name}: option", option, ["peak", "steps", "warmup_steps", "start", *required])
            )
    if missing := [option for option in required if required[option] and option not in options]:
        raise ScheduleError(f"{name}: {' and '.join(missing)} must be given")
