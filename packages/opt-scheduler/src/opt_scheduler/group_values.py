"""The learning rate and weight decay of every group at one step, from the settings and the groups' overrides."""

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ScheduleError
from .settings import Bounds, Settings, bounds_problems


def bounds_of(settings: Settings, group: Mapping[str, Any]) -> Bounds:
    """Return the bounds of `group`. An override of None counts as not set."""
    s = settings
    max_lr, min_lr, start_wd, end_wd, wd_mult = map(group.get, Bounds._fields)
    return Bounds(
        s.max_lr if max_lr is None else max_lr,
        s.min_lr if min_lr is None else min_lr,
        s.start_wd if start_wd is None else start_wd,
        s.end_wd if end_wd is None else end_wd,
        1.0 if wd_mult is None else wd_mult,
    )


def group_values(settings: Settings, groups: Sequence[Mapping[str, Any]], step: float) -> list[tuple[float, float]]:
    """Return the (learning rate, weight decay) of each group at `step`. The groups are only read.

    Raises:
        ScheduleError: the overrides of a group are invalid together with the settings that it does not override.
    """
    lr_of = settings.lr_formula(step)
    wd_of = settings.wd_formula(step)
    values: list[tuple[float, float]] = []
    last = None
    for i, group in enumerate(groups):
        bounds = bounds_of(settings, group)
        if bounds != last:  # most groups have the bounds of the group before
            if problem := next(bounds_problems(settings, bounds), None):
                overrides = {name: group[name] for name in Bounds._fields if group.get(name) is not None}
                raise ScheduleError(f"group {i} with {overrides or 'no overrides'}: {problem}")
            lr = lr_of(bounds.max_lr, bounds.min_lr)
            pair = (lr, wd_of(bounds.start_wd, bounds.end_wd) * bounds.wd_mult)
            last = bounds
        values.append(pair)
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
    low = group.get("min_lr")
    initial = group["initial_lr"]
    high = group.get("max_lr")
    if low is not None and high is not None and low < initial < high:
        raise ScheduleError(
            f"group 0 has max_lr={high!r}, min_lr={low!r} and initial_lr={initial!r}, as torch's OneCycleLR "
            "leaves them: two schedulers would write one lr. To use this one, remove those keys from the groups"
        )
