"""Records schedules in a saved state, and reports how the present ones differ from them."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .errors import ScheduleError
from .fields import FieldSchedule
from .schedule import Schedule

_POINTS = 4  # a callable is recorded by its values at the present step and at this many evenly spaced ones before


def saved_form(schedules: Sequence[FieldSchedule], num_steps: float) -> list[dict[str, Any]]:
    """Return `schedules` in plain types.

    Of a callable only the name is known, so its values at a few of the steps up to `num_steps` are recorded with it.
    """
    saved = []
    for each in schedules:
        plain = each.to_dict()
        if _has_function(plain["schedule"]):
            # Steps that the run has passed: a callable need not be defined beyond them, nor at fractions.
            steps = sorted({num_steps * i // _POINTS for i in range(_POINTS)} | {num_steps})
            values = ([step, _value(each.schedule, step)] for step in steps)
            plain["values"] = [pair for pair in values if pair[1] is not None]
        saved.append(plain)
    return saved


def in_plain_types(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved schedule whose `where` holds plain types only: another object is replaced by its repr."""
    return {**saved, "where": {key: _plain_or_repr(value) for key, value in saved["where"].items()}}


def changes(saved: Sequence[Mapping[str, Any]], schedules: Sequence[FieldSchedule], num_steps: float) -> list[str]:
    """Return one sentence for each schedule that is not what was saved; `num_steps` is the step of the resume."""
    before = {_key(plain): plain for plain in saved}
    found = []
    for each in schedules:
        here = each.to_dict()
        there = before.pop(_key(here), None)
        if there is None:
            found.append(f"{_label(here)} has a schedule here and had none in the checkpoint")
        else:
            found += _difference(each, there, num_steps)
    return found + [f"{_label(plain)} had a schedule in the checkpoint and has none here" for plain in before.values()]


def _difference(each: FieldSchedule, there: Mapping[str, Any], num_steps: float) -> Iterator[str]:
    here = each.to_dict()
    if bool(there.get("relative", False)) != each.relative:
        yield f"{_label(here)}: relative={each.relative} here, and {not each.relative} in the checkpoint"
    if _text(here["schedule"]) != _text(there["schedule"]):
        summary = _summary(each.schedule, there, num_steps)
        yield f"{_label(here)}: {summary}; here it is {here['schedule']!r}, in the checkpoint {there['schedule']!r}"
        return
    for step, value in there.get("values", ()):
        if (now := _value(each.schedule, step)) != value:
            found = "fails" if now is None else f"gives {now:g}"
            yield f"{_label(here)}: its callable {found} at step {step:g} here, and gave {value:g} in the saved run"
            return


def changed_callables(saved: Sequence[Mapping[str, Any]], schedules: Sequence[FieldSchedule]) -> list[str]:
    """Return one sentence for each schedule that is equal to a saved one by name but has other values."""
    here = {_key(each.to_dict()): each for each in schedules}
    found: list[str] = []
    for there in saved:
        each = here.get(_key(there))
        if each is not None and _text(each.to_dict()["schedule"]) == _text(there["schedule"]):
            found += _difference(each, there, 0)
    return found


def _summary(schedule: Schedule, there: Mapping[str, Any], num_steps: float) -> str:
    """The end and the value at `num_steps` of both schedules, as far as the saved one can be rebuilt."""
    try:
        saved = Schedule.from_dict(there["schedule"])
    except ScheduleError:
        return "its schedule changed"
    ends = (
        "changed" if schedule.length == saved.length else f"{_end(schedule)} here and {_end(saved)} in the checkpoint"
    )
    values = f"at step {num_steps:g} it is {schedule(num_steps):g} here and {saved(num_steps):g} in the checkpoint"
    return f"its schedule {ends}; {values}"


def _value(schedule: Schedule, step: float) -> float | None:
    """The value at a step, or None if the callable fails: its author may have defined it for some steps only."""
    try:
        return schedule(step)
    except Exception:  # a save must not fail for the sake of a record
        return None


def _plain_or_repr(value: object) -> object:
    try:
        json.dumps(value)
    except TypeError:
        return repr(value)
    return value


def _end(schedule: Schedule) -> str:
    return "never ends" if math.isinf(schedule.length) else f"ends at step {schedule.length:g}"


def _has_function(plain: object) -> bool:
    if isinstance(plain, Mapping):
        return plain.get("kind") == "function" or any(map(_has_function, plain.values()))
    return isinstance(plain, list | tuple) and any(map(_has_function, plain))


def _key(plain: Mapping[str, Any]) -> str:
    return f"{plain['field']} {_text(plain['where'])}"


def _label(plain: Mapping[str, Any]) -> str:
    return f"{plain['field']}" + (f" of groups with {dict(plain['where'])!r}" if plain["where"] else "")


def _text(plain: object) -> str:
    """Return `plain` as text, the same before and after a round trip through JSON."""
    return json.dumps(plain, sort_keys=True, default=repr)
