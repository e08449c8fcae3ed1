"""The learning rate and weight decay of every group at one step, from the settings and the groups' overrides."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .errors import ScheduleError
from .settings import Settings


class GroupValues(NamedTuple):
    """One entry per group."""

    lr: list[float]
    weight_decay: list[float]


class Bounds(NamedTuple):
    """The bounds between which one group anneals, with its overrides."""

    max_lr: float
    min_lr: float
    start_wd: float
    end_wd: float
    wd_mult: float


def bounds_of(settings: Settings, group: Mapping[str, Any]) -> Bounds:
    """Return the bounds of `group`. An override of None counts as not set."""

    def own(name: str, otherwise: float) -> float:
        return otherwise if (value := group.get(name)) is None else value

    return Bounds(
        own("max_lr", settings.max_lr),
        own("min_lr", settings.min_lr),
        own("start_wd", settings.start_wd),
        own("end_wd", settings.end_wd),
        own("wd_mult", 1.0),
    )


def group_values(settings: Settings, groups: Sequence[Mapping[str, Any]], step: float) -> GroupValues:
    """Return the values of all groups at `step`. The groups are only read.

    Raises:
        ScheduleError: the overrides of a group are invalid together with the settings that it does not override.
    """
    lr_of, wd_of = settings.lr_formula(step), settings.wd_formula(step)
    init, all_max, all_min = settings.init_lr, settings.max_lr, settings.min_lr
    all_start, all_end, flat = settings.start_wd, settings.end_wd, settings.wd_incr_style == "constant"
    lr, wd = lr_of(all_max, all_min), wd_of(all_start, all_end)
    last_high, last_low, last_start, last_end = all_max, all_min, all_start, all_end
    lrs, wds = [], []
    # A step spends its time in this loop, so `bounds_of` and `_problem` are inlined, and a group with the same bounds
    # as the one before it, the usual case, reuses its values.
    try:
        for group in groups:
            get = group.get
            if (high := get("max_lr")) is None:
                high = all_max
            if (low := get("min_lr")) is None:
                low = all_min
            if (start := get("start_wd")) is None:
                start = all_start
            if (end := get("end_wd")) is None:
                end = all_end
            if high != last_high or low != last_low:
                if not 0 <= low <= high >= init:
                    raise _refusal(settings, groups)
                lr, last_high, last_low = lr_of(high, low), high, low
            if start != last_start or end != last_end:
                if not 0 <= start <= end or (flat and start != end):
                    raise _refusal(settings, groups)
                wd, last_start, last_end = wd_of(start, end), start, end
            if (mult := get("wd_mult")) is not None and not mult >= 0:
                raise _refusal(settings, groups)
            lrs.append(lr)
            wds.append(wd if mult is None else wd * mult)
    except TypeError as error:
        raise _refusal(settings, groups) from error
    return GroupValues(lrs, wds)


def refuse_one_cycle(groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse groups in which torch's OneCycleLR has stored its own `max_lr` and `min_lr`, which are not overrides.

    It writes all groups in the same way, so the first is checked. Only OneCycleLR puts `initial_lr` strictly between
    the two.

    Raises:
        ScheduleError: says which keys to remove.
    """
    if not groups or "initial_lr" not in (group := groups[0]):
        return
    low, initial, high = group.get("min_lr"), group["initial_lr"], group.get("max_lr")
    if low is not None and high is not None and low < initial < high:
        raise ScheduleError(
            f"group 0 has max_lr={high!r}, min_lr={low!r} and initial_lr={initial!r}, as torch's OneCycleLR "
            "leaves them: two schedulers would write one lr. To use this one, remove those keys from the groups"
        )


def _refusal(settings: Settings, groups: Sequence[Mapping[str, Any]]) -> ScheduleError:
    """The error for the first invalid group."""
    for i, group in enumerate(groups):
        bounds = bounds_of(settings, group)
        if problem := _problem(settings, bounds):
            own = {name: group[name] for name in Bounds._fields if group.get(name) is not None}
            return ScheduleError(f"group {i} with {own or 'no overrides'}: {problem}")
    raise AssertionError("no group is invalid")


def _problem(settings: Settings, bounds: Bounds) -> str | None:
    """The reason why these bounds are invalid, or None."""
    high, low, start, end, _ = bounds
    for name, value in bounds._asdict().items():
        if not isinstance(value, int | float) or not value >= 0:
            return f"{name}={value!r} must be a number, at least 0"
    if low > high:
        return f"max_lr={high!r} must be at least min_lr={low!r}; set both in the group"
    if settings.init_lr > high:
        return (
            f"max_lr={high!r} must be at least init_lr={settings.init_lr!r}, at which the warmup of every group begins"
        )
    if start > end:
        return f"end_wd={end!r} must be at least start_wd={start!r}; set both in the group"
    if settings.wd_incr_style == "constant" and start != end:
        return f"wd_incr_style='constant' needs start_wd={start!r} equal to end_wd={end!r}; set both in the group"
    return None
