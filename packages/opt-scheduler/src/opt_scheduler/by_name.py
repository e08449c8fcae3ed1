"""Schedules by name, for runs that are described by a configuration file."""

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any

from . import curves
from .compose import warmup
from .errors import ScheduleError, unknown_name
from .recipes import cyclic, one_cycle, piecewise_constant, step_decay, wsd
from .restarts import repeat, restarts
from .schedule import Schedule, check_number

# A builder takes the peak and the options of its name. Its `steps` do not contain the warmup, which `get_schedule`
# puts before it; the builders of `_COMPLETE` take all arguments themselves.


def _to_end(curve: Callable[..., Schedule]) -> Callable[..., Schedule]:
    return lambda peak, *, steps, end=0.0: curve(peak, end, steps=steps)


def _cosine_restarts(
    peak: float, *, steps: float, end: float = 0.0, cycles: int = 1, t_mult: float = 1.0, decay: float = 1.0
) -> Schedule:
    check_number("cosine_restarts", low=1, cycles=cycles)
    check_number("cosine_restarts", above=0, t_mult=t_mult)
    periods = cycles if t_mult == 1 else (t_mult**cycles - 1) / (t_mult - 1)
    period = curves.ramp(peak, end, steps=steps / periods, shape="cosine")
    if t_mult == decay == 1:
        return repeat(period, times=cycles)
    return restarts(period, times=cycles, t_mult=t_mult, decay=decay)


_COMPLETE: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "cyclic": cyclic,
        "one_cycle": one_cycle,
        "piecewise_constant": piecewise_constant,
        "piecewise_linear": lambda *, points: curves.piecewise_linear(*map(tuple, points)),
        "step_decay": step_decay,
        "wsd": wsd,
    }
)
_BUILDERS: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        "linear": _to_end(curves.linear),
        "cosine": _to_end(curves.cosine),
        "minus_sqrt": _to_end(curves.minus_sqrt),
        "minus_square": _to_end(lambda peak, end, steps: curves.ramp(peak, end, steps=steps, shape="minus_square")),
        "shifted_exponential": _to_end(curves.shifted_exponential),
        "constant": curves.constant,
        "polynomial": lambda peak, *, steps, end=0.0, power=1.0: curves.polynomial(peak, end, steps=steps, power=power),
        "exponential": curves.exponential,
        "inverse_sqrt": curves.inverse_sqrt,
        "cosine_restarts": _cosine_restarts,
        **_COMPLETE,
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


def get_schedule(name: str, **arguments: Any) -> Schedule:
    """Build a schedule from its name and arguments, such as a configuration file holds.

    Most names take `peak`, `steps`, `warmup_steps` (0), `start` (0) and options: a warmup from `start` to `peak`, then
    the curve, which ends at step `steps`. `steps` counts from step 0 and contains the warmup. The recipes cyclic,
    one_cycle, piecewise_constant, piecewise_linear, step_decay and wsd take the arguments of their functions.
    `schedule_signatures()` lists the arguments of every name. The names of HF transformers for the same curves work
    too: constant_with_warmup, cosine_with_min_lr, cosine_with_restarts and warmup_stable_decay.

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
    canonical = _ALIASES.get(name, name)
    known = _defaults(canonical)
    for argument in arguments:
        if argument not in known:
            raise ScheduleError(unknown_name(f"{name}: argument", argument, known))
    missing = [key for key, default in known.items() if default is Parameter.empty and key not in arguments]
    if missing:
        raise ScheduleError(f"{name}: {' and '.join(missing)} must be given")
    amounts = {key: amount for key, amount in arguments.items() if key.endswith("steps")}
    check_number(name, low=0, **amounts)
    for key, amount in amounts.items():
        if amount is not None and 0 < amount < 1:
            raise ScheduleError(
                f"{name}: {key}={amount!r} is less than a step; for a fraction of the run, pass {amount!r} * steps"
            )
    build = _BUILDERS[canonical]
    if canonical in _COMPLETE:
        return build(**arguments)
    peak, steps, warmup_steps, start = (arguments.pop(key, 0) for key in ("peak", "steps", "warmup_steps", "start"))
    check_number(name, above=0, steps=steps)
    check_number(name, peak=peak, start=start)
    if warmup_steps >= steps:
        raise ScheduleError(f"{name}: {warmup_steps=} must be less than {steps=}, which include it")
    if build is curves.inverse_sqrt and arguments.get("timescale") is None:
        arguments["timescale"] = warmup_steps or 10_000
    return warmup(build(peak, steps=steps - warmup_steps, **arguments), steps=warmup_steps, start=start)


def _defaults(name: str) -> dict[str, Any]:
    """The arguments of a name that is no alias, with their defaults, or `Parameter.empty`."""
    build = _BUILDERS[name]
    parameters = {each.name: each.default for each in signature(build).parameters.values()}
    if name in _COMPLETE:
        return parameters
    del parameters[next(iter(parameters))]  # the peak, under the name that its curve has for it
    options = {key: default for key, default in parameters.items() if key != "steps"}
    if build is curves.inverse_sqrt:
        options["timescale"] = None
    common = {"peak": Parameter.empty, "steps": Parameter.empty}
    required = {key: default for key, default in options.items() if default is Parameter.empty}
    return {**common, **required, "warmup_steps": 0, "start": 0.0, **options}


def schedule_signatures() -> dict[str, str]:
    """Return the arguments of every name that `get_schedule` takes, with their defaults.

    >>> schedule_signatures()["cosine"]
    'peak, steps, warmup_steps=0, start=0.0, end=0.0'
    """
    return {
        name: ", ".join(
            key if default is Parameter.empty else f"{key}={default!r}"
            for key, default in _defaults(_ALIASES.get(name, name)).items()
        )
        for name in SCHEDULE_NAMES
    }
