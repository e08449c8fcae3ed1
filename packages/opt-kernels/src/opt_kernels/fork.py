"""Whether this process was forked after this package was imported. Imports only the standard library."""

import os

_forked = False  # set by the hook in the child


def is_forked() -> bool:
    """Whether threads that libraries started before the fork may be missing."""
    return _forked


def _in_child() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
