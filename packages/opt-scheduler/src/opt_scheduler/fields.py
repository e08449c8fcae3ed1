"""A schedule for one field of some parameter groups, and how its value is written into a group."""

import dataclasses
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias

from .errors import ScheduleError
from .schedule import Schedule, as_schedule

Group: TypeAlias = MutableMapping[str, Any]


class HasParamGroups(Protocol):
    """What a scheduler needs of an optimizer: its groups, which are read at every step."""

    @property
    def param_groups(self) -> Iterable[Group]: ...


Optimizers: TypeAlias = HasParamGroups | Sequence[HasParamGroups]


def groups_of(optimizer: Optimizers) -> list[Group]:
    """Return the present groups of one optimizer, or of several.

    Raises:
        ScheduleError: `optimizer` has no `param_groups`, for example because parameters were passed.
    """
    groups: list[Group] = []
    optimizers: Sequence[Any] = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    for each in optimizers:
        if getattr(each, "param_groups", None) is None:
            raise ScheduleError(
                f"optimizer={each!r} ({type(each).__name__}) has no param_groups; pass an optimizer such as "
                "torch.optim.AdamW, or a list of optimizers"
            )
        groups += each.param_groups
    return groups


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
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
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

    def current(self, group: Mapping[str, Any]) -> Any:
        """Return the present value of the field in `group`, or None."""
        entry = group.get(self.name)
        return entry if self.index is None or entry is None else entry[self.index]

    def matches(self, group: Mapping[str, Any]) -> bool:
        """Whether this schedule applies to `group`."""
        return all(key in group and group[key] == value for key, value in self.where.items())

    def to_dict(self) -> dict[str, Any]:
        """Return this object in plain types, for the state dict of a scheduler."""
        plain = {"field": self.field, "schedule": self.schedule.to_dict(), "where": dict(self.where)}
        return plain | ({"relative": True} if self.relative else {})


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


def write_fields_(groups: Iterable[Group], schedules: Sequence[FieldSchedule], step: float) -> None:
    """Set every scheduled field of every matching group to its value at `step`. Writes the groups."""
    filled: set[int] = set()
    values = [schedule.schedule(step) for schedule in schedules]  # all of them before the first group is written
    for schedule, value in zip(schedules, values, strict=True):
        for group in groups:
            if schedule.matches(group):
                factor = lr_scale_of(group) if schedule.field == "lr" else 1.0
                base = _initial_(group, schedule) if schedule.relative else 1.0
                _set_field_(group, schedule, value * base * factor, filled)


def lr_scale_of(group: Mapping[str, Any]) -> float:
    """Return the factor that timm, MAE and BEiT store in a group for its scheduler to apply, or 1."""
    scale = group.get("lr_scale")
    return 1.0 if scale is None else scale


def _initial_(group: Group, schedule: FieldSchedule) -> float:
    """Return the initial value of the group, which a relative schedule multiplies. Stores it in a new `group`."""
    if schedule.initial not in group:
        group[schedule.initial] = float(schedule.current(group))
    return float(group[schedule.initial])


def set_(group: Group, key: str, value: float, filled: set[int]) -> None:
    """Set one entry of a group, in place if it is a tensor. Writes `group`, and adds the tensor's id to `filled`."""
    group[key] = _new_entry(group.get(key), value, filled)


def _set_field_(group: Group, schedule: FieldSchedule, value: float, filled: set[int]) -> None:
    if schedule.index is None:
        set_(group, schedule.name, value, filled)
        return
    entry = group[schedule.name]
    places = list(entry)
    places[schedule.index] = _new_entry(places[schedule.index], value, filled)
    group[schedule.name] = type(entry)(places)


def _new_entry(old: Any, value: float, filled: set[int]) -> Any:
    """Return the entry that replaces `old`: the number `value`, or the tensor `old`, filled with it.

    A tensor keeps its identity, because captured graphs and compiled steps read from its address. It is recognized by
    its `fill_`, so torch need not be imported. A tensor that another group has filled already is cloned first: torch
    gives all groups the one tensor that was passed as lr, and they would all end with the last group's value.
    """
    if not hasattr(old, "fill_"):
        return value
    tensor = old.clone() if id(old) in filled else old
    filled.add(id(tensor))
    return tensor.fill_(value)


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
