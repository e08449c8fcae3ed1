"""`FieldScheduler`: writes pure schedules into the parameter groups of any optimizer."""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from .errors import ScheduleError, is_number
from .groups import VERSION, Entries, Group, GroupScheduler, Optimizers, check_state, new_entry, set_
from .schedule import Plain, Schedule, ScheduleLike, as_schedule

logger = logging.getLogger("opt_scheduler")

_PEAK_STEPS = 1000  # the number of steps among which `_peak` looks for the largest value
_POINTS = 4  # a callable is recorded by its values at the present step and at this many evenly spaced ones before


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FieldSchedule:
    """A schedule for one field of the groups whose entries equal those of `where`; an empty `where` means all groups.

    `field` is a key of the group, such as "lr", "momentum" or "eps", or one item of a tuple, such as "betas[0]".
    `schedule` may be a number or any callable of the step. With `relative`, it multiplies the initial value of each
    group, which is stored in the group as `initial_lr` (`initial_` and the field), as torch's schedulers do.

    >>> from opt_scheduler import constant, linear
    >>> FieldSchedule(field="betas[0]", schedule=linear(0.95, 0.85, steps=100)).name
    'betas'
    >>> FieldSchedule(field="lr", schedule=constant(1e-4), where={"name": "head"}).matches({"name": "head", "lr": 1.0})
    True

    Raises:
        ScheduleError: `field` is neither a name nor a name with an index, or `schedule` cannot be one.
    """

    field: str
    schedule: Schedule
    where: Entries = dataclasses.field(default_factory=dict)
    relative: bool = False

    def __post_init__(self) -> None:
        name, bracket, index = self.field.partition("[")
        if not name.isidentifier() or (bracket and not (index.endswith("]") and index[:-1].isdigit())):
            raise ScheduleError(
                f"FieldSchedule: field={self.field!r} must be a key of the groups, such as 'lr' or 'betas[0]'"
            )
        object.__setattr__(self, "schedule", as_schedule(self.schedule))

    @property
    def name(self) -> str:
        """The key of the group, without the index."""
        return self.field.partition("[")[0]

    @property
    def index(self) -> int | None:
        """The position in the tuple under that key, or None for the whole entry."""
        _, bracket, index = self.field.partition("[")
        return int(index[:-1]) if bracket else None

    @property
    def initial(self) -> str:
        """The key under which a group stores the value that a relative schedule multiplies."""
        return f"initial_{self.field}"

    def current(self, group: Entries) -> Any:
        """Return the present value of the field in `group`, or None."""
        entry = group.get(self.name)
        return entry if self.index is None or entry is None else entry[self.index]

    def matches(self, group: Entries) -> bool:
        """Whether this schedule applies to `group`."""
        return all(key in group and group[key] == value for key, value in self.where.items())

    def write_(self, group: Group, value: float, filled: set[int]) -> None:
        """Set the field of `group` by `set_`: to `value`, times its initial value if `relative`, and its `lr_scale`."""
        if self.relative and self.initial not in group:
            group[self.initial] = float(self.current(group))
        base = float(group[self.initial]) if self.relative else 1.0
        factor = _lr_scale(group) if self.field == "lr" else 1.0
        scaled = value * base * factor
        if self.index is None:
            set_(group, self.name, scaled, filled)
            return
        entry = group[self.name]
        items = list(entry)
        items[self.index] = new_entry(items[self.index], scaled, filled)
        group[self.name] = type(entry)(items)

    def to_dict(self) -> Plain:
        """Return this object in plain types, for the state dict of a scheduler."""
        plain = {"field": self.field, "schedule": self.schedule.to_dict(), "where": dict(self.where)}
        return plain | ({"relative": True} if self.relative else {})


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
        self.schedules = tuple(
            dataclasses.replace(each, relative=True) if relative else each for each in _field_schedules(schedules)
        )
        check_fields(self.schedules, self.param_groups)
        _check_lr_scales(self.param_groups)
        _warn_if_flattened(self.schedules, self.param_groups)
        self._lrs_before = [float(group.get("lr", 0.0)) for group in self.param_groups]
        self.step(0)

    def _write(self, groups: Sequence[Group], num_steps: float) -> None:
        filled: set[int] = set()
        values = [each.schedule(num_steps) for each in self.schedules]  # all of them before the first group is written
        for each, value in zip(self.schedules, values, strict=True):
            for group in filter(each.matches, groups):
                each.write_(group, value, filled)

    def _base_lr(self, place: int, group: Group) -> float:
        lr_schedule = self._lr_schedule(group)
        if lr_schedule is None:
            return float(group["lr"])
        if lr_schedule.relative:
            return float(group[lr_schedule.initial])
        # Without lr_scale: torch stores this as initial_lr, and a relative schedule would apply it twice.
        before = self._lrs_before[place] if place < len(self._lrs_before) else float(group["lr"])
        return _peak(lr_schedule.schedule) or before

    def writes_lr(self, group: Group) -> bool:
        return self._lr_schedule(group) is not None

    def _lr_schedule(self, group: Group) -> FieldSchedule | None:
        return next((each for each in self.schedules if each.field == "lr" and each.matches(group)), None)

    def state_dict(self) -> Plain:
        """Return the step count, the schedules, and the initial values that relative schedules multiply."""
        state: Plain = {
            "version": VERSION,
            "num_steps": self.num_steps,
            "schedules": saved_form(self.schedules, self.num_steps),
        }
        keys = {schedule.initial for schedule in self.schedules if schedule.relative}
        if keys:
            state["initial"] = [{key: group[key] for key in sorted(keys & set(group))} for group in self.param_groups]
        return state

    def load_state_dict(self, state_dict: Entries) -> None:
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
    """The largest value of a schedule at its boundaries and at a thousand evenly spaced steps. None for a schedule with
    neither an end nor boundaries, such as a callable."""
    end = schedule.length if schedule.length < math.inf else max(schedule.boundaries, default=None)
    if end is None:
        return None
    steps = [end * number / _PEAK_STEPS for number in range(_PEAK_STEPS + 1)]
    return max(map(schedule, [*schedule.boundaries, *steps]))


def _field_schedules(schedules: Schedules) -> Sequence[FieldSchedule]:
    if callable(schedules) or is_number(schedules):
        schedules = {"lr": schedules}
    if isinstance(schedules, Mapping):
        schedules = [FieldSchedule(field=name, schedule=as_schedule(given)) for name, given in schedules.items()]
    if not isinstance(schedules, list | tuple) or not all(isinstance(each, FieldSchedule) for each in schedules):
        raise ScheduleError(
            f"FieldScheduler: schedules={schedules!r} must be a schedule, a dict of schedules by field, or a list of "
            "FieldSchedule"
        )
    if not schedules:
        raise ScheduleError("FieldScheduler: schedules is empty; pass at least {'lr': ...}")
    return schedules


def _check_lr_scales(groups: Sequence[Group]) -> None:
    for i, group in enumerate(groups):
        scale = _lr_scale(group)
        if not is_number(scale) or not 0 <= scale < math.inf:
            raise ScheduleError(f"FieldScheduler: group {i}: lr_scale={scale!r} must be a number of at least 0")


def _warn_if_flattened(schedules: Sequence[FieldSchedule], groups: Sequence[Group]) -> None:
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


def check_fields(schedules: Sequence[FieldSchedule], groups: Sequence[Group]) -> None:
    """Check that `schedules` can be written into `groups`.

    Raises:
        ScheduleError: no group matches a schedule, a matching group lacks the field, two schedules match one field of
            one group. Names the field and the group.
    """
    for schedule in schedules:
        if not any(schedule.matches(group) for group in groups):
            raise ScheduleError(f"schedules: {schedule.field!r}: no group matches where={dict(schedule.where)!r}")
    for i, group in enumerate(groups):
        matching = [schedule for schedule in schedules if schedule.matches(group)]
        for j, schedule in enumerate(matching):
            _check_entry(schedule, group, where=f"schedules: group {i}")
            same = [other.index for other in matching[:j] if other.name == schedule.name]
            if same and (schedule.index is None or schedule.index in same or None in same):
                raise ScheduleError(f"schedules: group {i} has two for {schedule.field!r}; make their where disjoint")


def _check_entry(schedule: FieldSchedule, group: Group, *, where: str) -> None:
    if schedule.relative and group.get(schedule.initial, group.get(schedule.name)) is None:
        raise ScheduleError(f"{where}: relative=True needs a {schedule.field!r} to multiply, but the group has none")
    if schedule.name not in group and schedule.name not in ("lr", "weight_decay"):
        raise ScheduleError(f"{where} has no {schedule.name!r} to schedule; it has {sorted(set(group) - {'params'})}")
    if schedule.index is None:
        return
    entry = group[schedule.name]
    if not isinstance(entry, list | tuple) or schedule.index >= len(entry):
        raise ScheduleError(f"{where} has no {schedule.field!r}: its {schedule.name!r} is {entry!r}")


def _lr_scale(group: Entries) -> float:
    """The factor that timm, MAE and BEiT store in a group for its scheduler to apply, or 1."""
    scale = group.get("lr_scale")
    return 1.0 if scale is None else scale


def saved_form(schedules: Sequence[FieldSchedule], num_steps: float) -> list[Plain]:
    """Return `schedules` in plain types; in `where`, an object of another type is replaced by its repr.

    Of a callable only the name is known, so its values at a few of the steps up to `num_steps` are recorded with it.
    """
    # Steps that the run has passed: a callable need not be defined beyond them, nor at fractions.
    steps = sorted({num_steps * i // _POINTS for i in range(_POINTS)} | {num_steps})
    saved = []
    for each in schedules:
        plain = _plain(each)
        if '"kind": "function"' in json.dumps(plain):
            values = [[step, _value(each.schedule, step)] for step in steps]
            plain["values"] = [[step, value] for step, value in values if value is not None]
        saved.append(plain)
    return saved


def changes(saved: Sequence[Entries], schedules: Sequence[FieldSchedule], num_steps: float) -> list[str]:
    """Return one sentence for each schedule that is not what was saved; `num_steps` is the step of the resume."""
    before = {_key(plain): plain for plain in saved}
    sentences = []
    for each in schedules:
        here = _plain(each)
        there = before.pop(_key(here), None)
        if there is None:
            sentences.append(f"{_label(here)} has a schedule here and had none in the checkpoint")
        elif difference := _difference(each, here, there, num_steps):
            sentences.append(f"{_label(here)}: {difference}")
    gone = [f"{_label(plain)} had a schedule in the checkpoint and has none here" for plain in before.values()]
    return sentences + gone


def _difference(each: FieldSchedule, here: Entries, there: Entries, num_steps: float) -> str | None:
    if bool(there.get("relative", False)) != each.relative:
        return f"relative={each.relative} here, and {not each.relative} in the checkpoint"
    if here["schedule"] != there["schedule"]:
        both = f"here it is {here['schedule']!r}, in the checkpoint {there['schedule']!r}"
        try:
            saved = Schedule.from_dict(there["schedule"])
        except ScheduleError:  # a callable
            return f"its schedule changed; {both}"
        values = f"{each.schedule(num_steps):g} here and {saved(num_steps):g} in the checkpoint"
        return f"its schedule changed; at step {num_steps:g} it is {values}; {both}"
    for step, value in there.get("values", ()):
        if (now := _value(each.schedule, step)) != value:
            gives = "fails" if now is None else f"gives {now:g}"
            return f"its callable {gives} at step {step:g} here, and gave {value:g} in the saved run"
    return None


def _value(schedule: Schedule, step: float) -> float | None:
    """The value at a step, or None if the callable fails: its author may have defined it for some steps only."""
    try:
        return schedule(step)
    except Exception:  # a save must not fail for the sake of a record
        return None


def _label(plain: Entries) -> str:
    groups = f" of groups with {plain['where']!r}" if plain["where"] else ""
    return f"{plain['field']}{groups}"


def _key(plain: Entries) -> tuple[str, str]:
    return plain["field"], json.dumps(plain["where"], sort_keys=True)


def _plain(schedule: FieldSchedule) -> Plain:
    plain: Plain = json.loads(json.dumps(schedule.to_dict(), sort_keys=True, default=repr))
    return plain
