"""The package's error, the checks that raise it, and its wording: the field, the value, what is allowed, what to do."""

import math
from collections.abc import Iterable, Sequence
from typing import TypeGuard


class ScheduleError(ValueError):
    """An invalid schedule, scheduler setting or saved state.

    Megatron-Core's scheduler raises a bare `AssertionError` in such cases. Code that caught it there catches
    `ScheduleError` or `ValueError` here.
    """


def unknown_name(what: str, given: object, known: Iterable[str]) -> str:
    """Return the message for an unknown name: the known names, and a close match if there is one."""
    import difflib  # takes 3 ms to import, and only errors need it

    names = sorted(known)
    by_spelling = {name.lower(): name for name in names}
    near = difflib.get_close_matches(str(given).lower().replace("_", "-"), by_spelling, cutoff=0.5)
    hint = f"; did you mean {by_spelling[near[0]]!r}?" if near else ""
    return f"{what}={given!r} is not known: use one of {', '.join(map(repr, names))}{hint}"


def refuse(problems: Sequence[str], *, where: str) -> None:
    """Raise one `ScheduleError` that lists every problem, or return if the list is empty."""
    if len(problems) == 1:
        raise ScheduleError(f"{where}: {problems[0]}")
    if problems:
        raise ScheduleError("\n  - ".join([f"{where}: {len(problems)} problems", *problems]))


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is an int or a float, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_number(where: str, *, low: float = -math.inf, above: float = -math.inf, **given: float) -> None:
    """Raise `ScheduleError` unless every value is a finite number, at least `low` and more than `above`."""
    for name, value in given.items():
        if not is_number(value) or not math.isfinite(value):
            raise ScheduleError(f"{where}: {name}={value!r} must be a finite number{_quoted_number(value)}")
        if value < low:
            raise ScheduleError(f"{where}: {name}={value!r} must be at least {low:g}")
        if value <= above:
            raise ScheduleError(f"{where}: {name}={value!r} must be more than {above:g}")


def check_optional(where: str, *, low: float = -math.inf, above: float = -math.inf, **given: float | None) -> None:
    """Check the values as `check_number` does, except for None: an argument that was not given."""
    check_number(where, low=low, above=above, **{name: value for name, value in given.items() if value is not None})


def _quoted_number(value: object) -> str:
    """The hint for a number that a YAML file gave as text."""
    try:
        text = isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return ""
    return ", not text; YAML reads 1e-4 as text and 1.0e-4 as a number" if text else ""
