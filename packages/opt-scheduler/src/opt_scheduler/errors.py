"""The package's error and the wording of its messages: the field, the value, what is allowed, what to do."""

from collections.abc import Iterable, Sequence


class ScheduleError(ValueError):
    """An invalid schedule, scheduler setting or saved state.

    Megatron-Core's scheduler raises a bare `AssertionError` in such cases. Code that caught it there catches
    `ScheduleError` or `ValueError` here.
    """


def unknown_name(what: str, given: object, known: Iterable[str]) -> str:
    """Return the message for an unknown name: the known names, and a close match if there is one."""
    import difflib  # takes 3 ms to import, and only errors need it

    names = sorted(known)
    near = difflib.get_close_matches(str(given).lower().replace("_", "-"), [n.lower() for n in names], n=1, cutoff=0.5)
    by_lower = {name.lower(): name for name in names}
    hint = f"; did you mean {by_lower[near[0]]!r}?" if near else ""
    return f"{what}={given!r} is not known: use one of {', '.join(map(repr, names))}{hint}"


def refuse(problems: Sequence[str], *, where: str) -> None:
    """Raise one `ScheduleError` that lists every problem, or return if the list is empty."""
    if len(problems) == 1:
        raise ScheduleError(f"{where}: {problems[0]}")
    if problems:
        raise ScheduleError("\n  - ".join([f"{where}: {len(problems)} problems", *problems]))
