"""Lists of names and tables in messages."""

from collections.abc import Sequence


def and_more(names: Sequence[object]) -> str:
    """Return the first name and the number of the others: `'0.weight' (and 3 more)`."""
    return f"{str(names[0])!r} (and {len(names) - 1} more)"


def listed(names: Sequence[object], limit: int) -> str:
    """Return at most `limit` names, with dots for the others: `0, 1, ...`."""
    shown = ", ".join(map(str, names[:limit]))
    return f"{shown}, ..." if len(names) > limit else shown


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with columns aligned by spaces."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
