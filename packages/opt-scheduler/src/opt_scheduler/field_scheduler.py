"""`FieldScheduler`: pure schedules, applied to the parameter groups of any optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ScheduleError
from .fields import FieldSchedule, Group, Optimizers, check_fields, write_fields_
from .group_scheduler import GroupScheduler
from .schedule import Schedule

_VERSION = 1


class FieldScheduler(GroupScheduler):
    """Writes `schedules` into the groups of `optimizer`, and nothing else.

    A dict gives all groups the same, {"lr": ..., "betas[0]": ...}; a list of `FieldSchedule`s says which groups each
    is for.

    >>> from types import SimpleNamespace
    >>> from opt_scheduler import cosine, linear
    >>> optimizer = SimpleNamespace(param_groups=[{"lr": 0.0, "weight_decay": 0.0}])
    >>> scheduler = FieldScheduler(
    ...     optimizer, {"lr": cosine(1e-3, 1e-4, steps=100), "weight_decay": linear(0.0, 0.1, steps=100)}
    ... )
    >>> scheduler.step(50)
    >>> optimizer.param_groups
    [{'lr': 0.00055, 'weight_decay': 0.05}]

    Raises:
        ScheduleError: no schedules; one that no group matches; two for one field of one group.
    """

    def __init__(self, optimizer: Optimizers, schedules: Mapping[str, Schedule] | Sequence[FieldSchedule]) -> None:
        super().__init__(optimizer)
        if isinstance(schedules, Mapping):
            schedules = [FieldSchedule(field=name, schedule=schedule) for name, schedule in schedules.items()]
        if not schedules:
            raise ScheduleError("FieldScheduler: schedules is empty; give at least {'lr': ...}")
        self.schedules = tuple(schedules)
        check_fields(self.schedules, self.param_groups)
        self.step(0)

    def _write(self, groups: Sequence[Group], num_steps: float) -> None:
        write_fields_(groups, self.schedules, num_steps)

    def _base_lr(self, group: Group) -> float:
        mine = (s.schedule(0) for s in self.schedules if s.field == "lr" and s.matches(group))
        return next(mine, float(group["lr"]))

    def state_dict(self) -> dict[str, Any]:
        """The step count; the schedules are values that whoever resumes writes down again."""
        return {"version": _VERSION, "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the saved step; the schedules stay those of this object.

        Raises:
            ScheduleError: no step count, or a state of a newer version.
        """
        if "num_steps" not in state_dict:
            raise ScheduleError(f"FieldScheduler: state has no 'num_steps', only {sorted(state_dict)}")
        if state_dict.get("version", _VERSION) > _VERSION:
            raise ScheduleError(f"FieldScheduler: version={state_dict['version']!r} is newer than {_VERSION}")
        self.seek(state_dict["num_steps"])
