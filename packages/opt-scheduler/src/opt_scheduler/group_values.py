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
    values = GroupValues([], [])
    last, lr, weight_decay = None, 0.0, 0.0
    for i, group in enumerate(groups):
        bounds = bounds_of(settings, group)
        if bounds != last:  # most groups have the bounds of the group before
            if problem := _problem(settings, bounds):
                own = {name: group[name] for name in Bounds._fields if group.get(name) is not None}
                raise ScheduleError(f"group {i} with {own or 'no overrides'}: {problem}")
            lr = lr_of(bounds.max_lr, bounds.min_lr)
            weight_decay = wd_of(bounds.start_wd, bounds.end_wd) * bounds.wd_mult
            last = bounds
        values.lr.append(lr)
        values.weight_decay.append(weight_decay)
    return values


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


def _problem(settings: Settings, bounds: Bounds) -> str | None:
    """The reason why these bounds are invalid, or None."""
    high, low, start, end, _ = bounds
    for name, value in bounds._asdict().items():
        if not _at_least_0(value):
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


def _at_least_0(value: Any) -> bool:
    try:
        return bool(value >= 0)
    except TypeError:
        return False
