"""Whether this process was forked from one that had imported this package. Imports nothing but the standard library."""

import os

_forked = False  # set in the child, by the only hook that runs there


def is_forked() -> bool:
    """Whether threads that libraries started before may be missing here."""
    return _forked


def _in_child() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
