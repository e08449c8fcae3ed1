"""What a refusal looks like: the field, the value given, what is allowed, how to go on."""

from collections.abc import Iterable, Sequence


# Also an AssertionError: the reference refuses with bare asserts, and code or tests that catch those keep working.
class ScheduleError(ValueError, AssertionError):
    """A schedule, a scheduler, or a state to be loaded that cannot mean anything."""


def unknown_name(what: str, given: object, known: Iterable[str]) -> str:
    """The sentence for a name that is not among the known ones, with the nearest of them where one is near."""
    import difflib  # 3 ms to import, and needed only on the way to an error

    names = sorted(known)
    near = difflib.get_close_matches(str(given).lower().replace("_", "-"), [n.lower() for n in names], n=1, cutoff=0.5)
    by_lower = {name.lower(): name for name in names}
    hint = f"; did you mean {by_lower[near[0]]!r}?" if near else ""
    return f"{what}={given!r} is not known: use one of {', '.join(map(repr, names))}{hint}"


def refuse(problems: Sequence[str], *, where: str) -> None:
    """Raise one `ScheduleError` that lists every problem; return if there is none."""
    if len(problems) == 1:
        raise ScheduleError(f"{where}: {problems[0]}")
    if problems:
        raise ScheduleError("\n  - ".join([f"{where}: {len(problems)} problems", *problems]))
