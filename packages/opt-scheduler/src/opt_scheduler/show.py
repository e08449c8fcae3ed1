"""Schedules as a table of numbers, or as a PNG if matplotlib is installed."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import ScheduleError
from .schedule import Schedule


def table(schedules: Mapping[str, Schedule], steps: Sequence[float]) -> str:
    """Return a table with one row per step and one column per schedule.

    >>> from opt_scheduler import cosine
    >>> print(table({"lr": cosine(1e-3, 1e-4, steps=100)}, [0, 50, 100]))
          step           lr
             0        0.001
            50      0.00055
           100       0.0001
    """
    header = f"{'step':>10}" + "".join(f" {name:>12}" for name in schedules)
    rows = (f"{step:>10g}" + "".join(f" {schedule(step):>12.6g}" for schedule in schedules.values()) for step in steps)
    return "\n".join([header, *rows])


def rows_to_show(schedules: Mapping[str, Schedule], *, num_rows: int) -> list[float]:
    """Return about `num_rows` evenly spaced steps of the longest schedule, and every boundary."""
    end = max(schedule.horizon() for schedule in schedules.values())
    even = {float(round(end * i / (num_rows - 1))) for i in range(num_rows)} if num_rows > 1 else {0.0}
    return sorted(even.union(*(schedule.boundaries for schedule in schedules.values())))


def save_png(schedules: Mapping[str, Schedule], path: Path, *, steps: float) -> None:
    """Write a PNG to `path`, with one panel per schedule over steps 0 to `steps`.

    Raises:
        ScheduleError: matplotlib is not installed.
    """
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ScheduleError("a PNG needs matplotlib: python -m pip install matplotlib") from error
    # Not pyplot, which keeps figures in global state and may look for a display.
    figure = figure_module.Figure(figsize=(7, 2.4 * len(schedules)), layout="constrained")
    columns = [steps * i / 1000 for i in range(1001)]
    axes = figure.subplots(len(schedules), 1, sharex=True, squeeze=False)
    for axis, (name, schedule) in zip(axes[:, 0], schedules.items(), strict=True):
        axis.plot(columns, schedule.values(columns), linewidth=2)
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("step")
    figure.savefig(path, dpi=150)
