"""Shows functions of the step: as a table, as text and as SVG without any dependency, and as PNG with matplotlib."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .errors import ScheduleError

__all__ = ["Curve", "save_png", "svg_plot", "table", "text_plot"]

Curve = Callable[[float], float]

_MARKS = "•×+o*#"
_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#9498a0")


def text_plot(curves: Sequence[Curve], *, steps: float, width: int = 72, height: int = 14) -> str:
    """Draw `curves` over steps 0 to `steps` on one grid of `width` x `height` characters, with both axes labelled.

    Raises:
        ScheduleError: the grid is smaller than 2 x 2, or `steps` is not above 0.
    """
    if width < 2 or height < 2 or not steps > 0:
        raise ScheduleError(
            f"cannot plot {steps=} on a grid of {width=} x {height=}: need steps > 0 and at least 2 x 2"
        )
    columns = [steps * x / (width - 1) for x in range(width)]
    samples = [[curve(step) for step in columns] for curve in curves]
    low, high = _limits(samples)
    grid = [[" "] * width for _ in range(height)]
    for mark, values in zip(_MARKS * len(samples), samples, strict=False):
        for x, value in enumerate(values):
            grid[round((high - value) / (high - low) * (height - 1))][x] = mark
    labels = [
        f"{high - (high - low) * y / (height - 1):10.3g}" if y % 3 == 0 or y == height - 1 else " " * 10
        for y in range(height)
    ]
    lines = [f"{label} ┤{''.join(row)}".rstrip() for label, row in zip(labels, grid, strict=True)]
    end = f"{steps:g}"
    return "\n".join([*lines, " " * 11 + "└" + "─" * width, " " * 12 + "0" + end.rjust(width - 1)])


def svg_plot(curves: Sequence[Curve], *, steps: float, width: int = 560, height: int = 200, points: int = 281) -> str:
    """Draw `curves` over steps 0 to `steps` as a self-contained SVG of `width` x `height` pixels."""
    columns = [steps * x / (points - 1) for x in range(points)]
    samples = [[curve(step) for step in columns] for curve in curves]
    low, high = _limits(samples)
    left = 64
    bottom = height - 24

    def path(values: Sequence[float]) -> str:
        xs = (left + (width - left - 12) * x / (points - 1) for x in range(points))
        ys = (12 + (bottom - 12) * (high - value) / (high - low) for value in values)
        return "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))

    paths = "".join(
        f'<path d="{path(values)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for values, colour in zip(samples, _COLOURS * len(samples), strict=False)
    )
    text = 'font-family="sans-serif" font-size="11" fill="currentColor"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<path d="M{left},12 V{bottom} H{width - 12}" fill="none" stroke="currentColor" opacity="0.4"/>{paths}'
        f'<text x="{left - 6}" y="16" text-anchor="end" {text}>{high:.3g}</text>'
        f'<text x="{left - 6}" y="{bottom}" text-anchor="end" {text}>{low:.3g}</text>'
        f'<text x="{left}" y="{height - 8}" {text}>0</text>'
        f'<text x="{width - 12}" y="{height - 8}" text-anchor="end" {text}>{steps:g}</text></svg>'
    )


def _limits(samples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the lowest and highest value to draw, never equal; 0 is included if it is not far below."""
    low = min(map(min, samples))
    high = max(map(max, samples))
    if 0 < low < high / 2 or low == high > 0:
        low = 0.0
    return (low, high) if high > low else (low, low + 1.0)


def table(schedules: Mapping[str, Curve], steps: Sequence[float]) -> str:
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


def save_png(schedules: Mapping[str, Curve], path: Path, *, steps: float) -> None:
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
        axis.plot(columns, [schedule(step) for step in columns], linewidth=2)
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    axes[-1, 0].set_xlabel("step")
    figure.savefig(path, dpi=150)
