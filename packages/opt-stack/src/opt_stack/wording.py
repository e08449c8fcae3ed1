"""Lists of names in messages."""

from collections.abc import Sequence


def and_more(names: Sequence[object]) -> str:
    """Return the first name and the number of the others: `'0.weight' (and 3 more)`."""
    return f"{str(names[0])!r} (and {len(names) - 1} more)"


def listed(names: Sequence[object], limit: int) -> str:
    """Return at most `limit` names, with dots for the others: `0, 1, ...`."""
    shown = ", ".join(map(str, names[:limit]))
    return f"{shown}, ..." if len(names) > limit else shown
