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
    samples, low, high = _sampled(curves, steps, width)
    grid = [[" "] * width for _ in range(height)]
    for mark, values in zip(_MARKS * len(samples), samples, strict=False):
        for x, value in enumerate(values):
            grid[round((high - value) / (high - low) * (height - 1))][x] = mark
    lines = []
    for y, row in enumerate(grid):
        has_label = y % 3 == 0 or y == height - 1
        label = f"{high - (high - low) * y / (height - 1):10.3g}" if has_label else " " * 10
        lines.append(f"{label} ┤{''.join(row)}".rstrip())
    axis = " " * 11 + "└" + "─" * width
    ends = " " * 12 + "0" + f"{steps:g}".rjust(width - 1)
    return "\n".join([*lines, axis, ends])


def svg_plot(curves: Sequence[Curve], *, steps: float) -> str:
    """Draw `curves` over steps 0 to `steps` as a self-contained SVG of 560 x 200 pixels."""
    points = 281
    samples, low, high = _sampled(curves, steps, points)
    left = 64
    right = 548
    bottom = 176
    drawn = []
    for curve, colour in zip(samples, _COLOURS * len(samples), strict=False):
        xs = [left + (right - left) * x / (points - 1) for x in range(points)]
        ys = [12 + (bottom - 12) * (high - value) / (high - low) for value in curve]
        path = " L".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        drawn.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')

    def text(x: int, y: int, label: str, place: str = "") -> str:
        return (
            f'<text x="{x}" y="{y}" {place}font-family="sans-serif" font-size="11" fill="currentColor">{label}</text>'
        )

    head = '<svg xmlns="http://www.w3.org/2000/svg" width="560" height="200" viewBox="0 0 560 200">'
    axes = f'<path d="M{left},12 V{bottom} H{right}" fill="none" stroke="currentColor" opacity="0.4"/>'
    end = 'text-anchor="end" '
    limits = text(left - 6, 16, f"{high:.3g}", end) + text(left - 6, bottom, f"{low:.3g}", end)
    first_and_last = text(left, 192, "0") + text(right, 192, f"{steps:g}", end)
    return head + axes + "".join(drawn) + limits + first_and_last + "</svg>"


def _sampled(curves: Sequence[Curve], steps: float, points: int) -> tuple[list[list[float]], float, float]:
    """The values of each curve at evenly spaced steps, and the lowest and highest value to draw, never equal.

    0 is drawn too if it is not far below.
    """
    columns = [steps * x / (points - 1) for x in range(points)]
    samples = [[curve(step) for step in columns] for curve in curves]
    low = min(map(min, samples))
    high = max(map(max, samples))
    if 0 < low < high / 2 or low == high > 0:
        low = 0.0
    return samples, low, high if high > low else low + 1.0


def table(schedules: Mapping[str, Curve], steps: Sequence[float]) -> str:
    """Return a table with one row per step and one column per schedule.

    >>> from opt_scheduler import cosine
    >>> print(table({"lr": cosine(1e-3, 1e-4, steps=100)}, [0, 50, 100]))
          step           lr
             0        0.001
            50      0.00055
           100       0.0001
    """
    lines = [f"{'step':>10}" + "".join(f" {name:>12}" for name in schedules)]
    for step in steps:
        values = [f" {schedule(step):>12.6g}" for schedule in schedules.values()]
        lines.append(f"{step:>10g}" + "".join(values))
    return "\n".join(lines)


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
