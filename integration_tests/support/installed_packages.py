"""Read the metadata of installed packages once a process, and not for each optimizer, which looks for rules in them."""

import sys
from functools import cache
from importlib.metadata import entry_points


def read_entry_points_once() -> None:
    """Keep the entry points of each `sys.path`. Does nothing in a process that has not imported `opt_stack`.

    Reading the metadata of all packages for each optimizer takes a tenth of the time of the integration tests.
    """
    registry = sys.modules.get("opt_stack.rules.registry")
    if registry is not None:
        read = cache(lambda path, group: entry_points(group=group))
        registry.entry_points = lambda group: read(tuple(sys.path), group)
