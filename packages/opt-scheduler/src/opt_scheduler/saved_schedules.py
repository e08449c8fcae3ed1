"""Records schedules in a saved state, and reports how the present ones differ from them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ScheduleError
from .fields import FieldSchedule
from .schedule import Schedule

_POINTS = 4  # a callable is recorded by its values at the present step and at this many evenly spaced ones before


def saved_form(schedules: Sequence[FieldSchedule], num_steps: float) -> list[dict[str, Any]]:
    """Return `schedules` in plain types; in `where`, an object of another type is replaced by its repr.

    Of a callable only the name is known, so its values at a few of the steps up to `num_steps` are recorded with it.
    """
    saved = []
    for each in schedules:
        plain = json.loads(_text(each))
        if '"kind": "function"' in _text(each):
            # Steps that the run has passed: a callable need not be defined beyond them, nor at fractions.
            steps = sorted({num_steps * i // _POINTS for i in range(_POINTS)} | {num_steps})
            values = ((step, _value(each.schedule, step)) for step in steps)
            plain["values"] = [[step, value] for step, value in values if value is not None]
        saved.append(plain)
    return saved


def changes(saved: Sequence[Mapping[str, Any]], schedules: Sequence[FieldSchedule], num_steps: float) -> list[str]:
    """Return one sentence for each schedule that is not what was saved; `num_steps` is the step of the resume."""
    before = {(plain["field"], json.dumps(plain["where"], sort_keys=True)): plain for plain in saved}
    sentences = []
    for each in schedules:
        here = json.loads(_text(each))
        there = before.pop((each.field, json.dumps(here["where"], sort_keys=True)), None)
        if there is None:
            sentences.append(f"{_label(here)} has a schedule here and had none in the checkpoint")
        elif difference := _difference(each, here, there, num_steps):
            sentences.append(f"{_label(here)}: {difference}")
    return sentences + [
        f"{_label(plain)} had a schedule in the checkpoint and has none here" for plain in before.values()
    ]


def _difference(each: FieldSchedule, here: Mapping[str, Any], there: Mapping[str, Any], num_steps: float) -> str | None:
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


def _label(plain: Mapping[str, Any]) -> str:
    return f"{plain['field']}" + (f" of groups with {plain['where']!r}" if plain["where"] else "")


def _text(schedule: FieldSchedule) -> str:
    return json.dumps(schedule.to_dict(), sort_keys=True, default=repr)
