"""The logger, lists of names in messages, and where warnings point."""

import logging
import sys
from collections.abc import Iterable, Sequence

logger = logging.getLogger("opt_stack")
_INSIDE = ("contextlib", "opt_distributed", "opt_stack", "torch")  # modules that a warning does not point to


def and_more(names: Sequence[object]) -> str:
    """Return the first name and the number of the others: `'0.weight' (and 3 more)`."""
    return f"{str(names[0])!r} (and {len(names) - 1} more)"


def listed(names: Sequence[object], limit: int) -> str:
    """Return at most `limit` names, with dots for the others: `0, 1, ...`."""
    shown = ", ".join(map(str, names[:limit]))
    return f"{shown}, ..." if len(names) > limit else shown


def ranks_text(ranks: Iterable[int]) -> str:
    """Return `rank 3` or `ranks 0, 3`."""
    numbers = sorted(ranks)
    word = "ranks" if len(numbers) > 1 else "rank"
    return f"{word} {listed(numbers, 8)}"


def caller_level() -> int:
    """Return the `stacklevel` with which a warning of the caller of this function points to the user's code."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        level += 1
        frame = frame.f_back
    return level
