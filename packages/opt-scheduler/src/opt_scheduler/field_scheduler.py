"""`FieldScheduler`: writes pure schedules into the parameter groups of any optimizer."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from .errors import ScheduleError, is_number
from .fields import FieldSchedule, Group, Optimizers, check_fields, lr_scale_of, write_fields_
from .group_scheduler import VERSION, GroupScheduler, check_state
from .saved_schedules import changes, saved_form
from .schedule import Schedule, ScheduleLike, as_schedule

logger = logging.getLogger("opt_scheduler")

_PEAK_STEPS = 1000  # at which the largest value is looked for

Schedules: TypeAlias = ScheduleLike | Mapping[str, ScheduleLike] | Sequence[FieldSchedule]


class FieldScheduler(GroupScheduler):
    """Writes `schedules` into the parameter groups of `optimizer`, and nothing else.

    `schedules` is one schedule for the learning rate, a dict of schedules by field ({"lr": ..., "betas[0]": ...}), or a
    list of `FieldSchedule`s, each for some of the groups. A schedule is a `Schedule`, a number or any callable of the
    step.

    By default a schedule gives all groups the same value, and a warning is logged if their values differed. With
    `relative=True` it multiplies each group's own value: `initial_lr` if a scheduler has stored one, else the present
    `lr`. Learning rates that differ by group, for example through layer decay, keep their ratios. In both modes a
    group's `lr_scale`, the key by which timm, MAE and BEiT pass a layer decay to the scheduler, multiplies its learning
    rate.

    The state dict holds the schedules. They are not restored from it, but a warning is logged on load if they changed.

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
    >>> FieldScheduler(optimizer, cosine(1.0, 0.1, steps=100), relative=True).step(50)
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.00055, 0.0055000000000000005]

    Raises:
        ScheduleError: there are no schedules; no group matches one of them; two match one field of one group; or a
            group has no value to multiply, or an `lr_scale` that is not a number.
    """

    def __init__(self, optimizer: Optimizers, schedules: Schedules, *, relative: bool = False) -> None:
        super().__init__(optimizer)
        self.schedules = tuple(replace(each, relative=True) if relative else each for each in _by_field(schedules))
        check_fields(self.schedules, self.param_groups)
        _check_lr_scales(self.param_groups)
        _warn_of_flattened(self.schedules, self.param_groups)
        self._lrs_before = [float(group.get("lr", 0.0)) for group in self.param_groups]
        self.step(0)

    def _write(self, groups: Sequence[Group], num_steps: float) -> None:
        write_fields_(groups, self.schedules, num_steps)

    def _base_lr(self, place: int, group: Group) -> float:
        for schedule in self.schedules:
            if schedule.field == "lr" and schedule.matches(group):
                if schedule.relative:
                    return float(group[schedule.initial])
                # Without lr_scale: torch stores this as initial_lr, and a relative schedule would apply it twice.
                before = self._lrs_before[place] if place < len(self._lrs_before) else float(group["lr"])
                return _peak(schedule.schedule) or before
        return float(group["lr"])

    def writes_lr(self, group: Group) -> bool:
        return any(schedule.field == "lr" and schedule.matches(group) for schedule in self.schedules)

    def state_dict(self) -> dict[str, Any]:
        """Return the step count, the schedules, and the initial values that relative schedules multiply."""
        state: dict[str, Any] = {
            "version": VERSION,
            "num_steps": self.num_steps,
            "schedules": saved_form(self.schedules, self.num_steps),
        }
        keys = {schedule.initial for schedule in self.schedules if schedule.relative}
        if keys:
            state["initial"] = [{key: group[key] for key in sorted(keys & set(group))} for group in self.param_groups]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to the saved step. The schedules stay those of this object; a warning names each one that changed.

        Raises:
            ScheduleError: the state has no step count, is of a newer version, or has another number of groups. Nothing
                has changed then.
        """
        check_state("FieldScheduler", state_dict, ["num_steps"])
        num_steps = state_dict["num_steps"]
        if not 0 <= num_steps < math.inf:
            raise ScheduleError(f"FieldScheduler: num_steps={num_steps!r} must be at least 0 and finite")
        groups = self.param_groups
        initial = state_dict.get("initial")
        if initial is not None and len(initial) != len(groups):
            raise ScheduleError(
                f"FieldScheduler: the state has {len(initial)} groups and the optimizer {len(groups)}; build the "
                "optimizer with the groups of the saved run"
            )
        for each in self.schedules:
            each.schedule(num_steps)  # a callable may fail, and must do so before anything is written
        changed = changes(state_dict["schedules"], self.schedules, num_steps) if "schedules" in state_dict else []
        if initial is not None and any(schedule.relative for schedule in self.schedules):
            for group, values in zip(groups, initial, strict=True):
                group.update(values)
        self.seek(num_steps)
        for change in changed:
            logger.warning("FieldScheduler, resumed at step %g: %s", num_steps, change)


def _peak(schedule: Schedule) -> float | None:
    """The largest value of a schedule over its length, at its boundaries and a thousand steps between them. None if
    they are not known, as those of a callable."""
    end = schedule.length
    if math.isinf(end):
        end = max(schedule.boundaries, default=math.inf)
    if math.isinf(end):
        return None
    even = [end * number / _PEAK_STEPS for number in range(_PEAK_STEPS + 1)]
    return max(map(schedule, [*schedule.boundaries, *even]))


def _by_field(schedules: Schedules) -> list[FieldSchedule]:
    if callable(schedules) or is_number(schedules):
        return [FieldSchedule(field="lr", schedule=as_schedule(schedules))]
    if isinstance(schedules, Mapping):
        schedules = [FieldSchedule(field=name, schedule=as_schedule(given)) for name, given in schedules.items()]
    if not isinstance(schedules, list | tuple) or not all(isinstance(each, FieldSchedule) for each in schedules):
        raise ScheduleError(
            f"FieldScheduler: schedules={schedules!r} must be a schedule, a dict of schedules by field, or a list of "
            "FieldSchedule"
        )
    if not schedules:
        raise ScheduleError("FieldScheduler: schedules is empty; pass at least {'lr': ...}")
    return list(schedules)


def _check_lr_scales(groups: Sequence[Group]) -> None:
    for i, group in enumerate(groups):
        scale = lr_scale_of(group)
        if not is_number(scale) or not 0 <= scale < math.inf:
            raise ScheduleError(f"FieldScheduler: group {i}: lr_scale={scale!r} must be a number of at least 0")


def _warn_of_flattened(schedules: Sequence[FieldSchedule], groups: Sequence[Group]) -> None:
    """Log a warning for each schedule that is about to replace different values by one."""
    for schedule in schedules:
        present = [schedule.current(group) for group in groups if schedule.matches(group)]
        values = sorted({float(value) for value in present if value is not None})
        if len(values) > 1 and not schedule.relative:
            logger.warning(
                "FieldScheduler sets one %s for groups that have different ones: %s; pass relative=True to multiply "
                "each group's own value, or a FieldSchedule(where=...) for each group",
                schedule.field, values,
            )  # fmt: skip
