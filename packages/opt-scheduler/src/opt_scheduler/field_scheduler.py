"""`FieldScheduler`: pure schedules, applied to the parameter groups of any optimizer."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .errors import ScheduleError
from .fields import FieldSchedule, Group, Optimizers, check_fields, write_fields_
from .group_scheduler import GroupScheduler
from .schedule import Schedule

logger = logging.getLogger("opt_scheduler")

_VERSION = 1


class FieldScheduler(GroupScheduler):
    """Writes `schedules` into the groups of `optimizer`, and nothing else.

    A dict gives all groups the same, {"lr": ..., "betas[0]": ...}; a list of `FieldSchedule`s says which groups each
    is for. All groups then have the same value, and a warning is logged if they differed before. With `relative=True`
    schedules multiply what each group had: its `initial_lr` if a scheduler has set one, else its present value.

    >>> from types import SimpleNamespace
    >>> from opt_scheduler import cosine, linear
    >>> optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "weight_decay": 0.0}])
    >>> scheduler = FieldScheduler(
    ...     optimizer, {"lr": cosine(1e-3, 1e-4, steps=100), "weight_decay": linear(0.0, 0.1, steps=100)}
    ... )
    >>> scheduler.step(50)
    >>> optimizer.param_groups
    [{'lr': 0.00055, 'weight_decay': 0.05}]
    >>> optimizer = SimpleNamespace(param_groups=[{"lr": 1e-3}, {"lr": 1e-2}])
    >>> FieldScheduler(optimizer, {"lr": cosine(1.0, 0.1, steps=100)}, relative=True).step(50)
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.00055, 0.0055000000000000005]

    Raises:
        ScheduleError: no schedules; one that no group matches; two for one field of one group.
    """

    def __init__(
        self,
        optimizer: Optimizers,
        schedules: Mapping[str, Schedule] | Sequence[FieldSchedule],
        *,
        relative: bool = False,
    ) -> None:
        super().__init__(optimizer)
        if isinstance(schedules, Mapping):
            schedules = [FieldSchedule(field=name, schedule=schedule) for name, schedule in schedules.items()]
        if not schedules:
            raise ScheduleError("FieldScheduler: schedules is empty; give at least {'lr': ...}")
        self.schedules = tuple(replace(each, relative=True) if relative else each for each in schedules)
        check_fields(self.schedules, self.param_groups)
        _warn_of_flattened(self.schedules, self.param_groups)
        self.step(0)

    def _write(self, groups: Sequence[Group], num_steps: float) -> None:
        write_fields_(groups, self.schedules, num_steps)

    def _base_lr(self, group: Group) -> float:
        for schedule in self.schedules:
            if schedule.field == "lr" and schedule.matches(group):
                return float(group[schedule.initial]) if schedule.relative else schedule.schedule(0)
        return float(group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """The step count, and the initial values that relative schedules multiply; the schedules are not saved."""
        state: dict[str, Any] = {"version": _VERSION, "num_steps": self.num_steps}
        keys = {schedule.initial for schedule in self.schedules if schedule.relative}
        if keys:
            state["initial"] = [{key: group[key] for key in sorted(keys & set(group))} for group in self.param_groups]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the saved step; the schedules stay those of this object.

        Raises:
            ScheduleError: no step count, a state of a newer version, or one of another number of groups.
        """
        if "num_steps" not in state_dict:
            raise ScheduleError(f"FieldScheduler: state has no 'num_steps', only {sorted(state_dict)}")
        if state_dict.get("version", _VERSION) > _VERSION:
            raise ScheduleError(f"FieldScheduler: version={state_dict['version']!r} is newer than {_VERSION}")
        groups, initial = self.param_groups, state_dict.get("initial")
        if initial is not None and len(initial) != len(groups):
            raise ScheduleError(f"FieldScheduler: state is of {len(initial)} groups, the optimizer has {len(groups)}")
        if initial is not None and any(schedule.relative for schedule in self.schedules):
            for group, values in zip(groups, initial, strict=True):
                group.update(values)
        self.seek(state_dict["num_steps"])


def _warn_of_flattened(schedules: Sequence[FieldSchedule], groups: Sequence[Group]) -> None:
    """Log a warning for each field of which groups have different values that one schedule is about to replace."""
    for schedule in schedules:
        present = [schedule.current(group) for group in groups if schedule.matches(group)]
        values = sorted({float(value) for value in present if value is not None})
        if len(values) > 1 and not schedule.relative:
            logger.warning(
                "FieldScheduler sets one %s for groups that have different ones: %s; pass relative=True to multiply "
                "each group's own value, or a FieldSchedule(where=...) for each group",
                schedule.field, values,
            )  # fmt: skip
