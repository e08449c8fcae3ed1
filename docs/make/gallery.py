"""The gallery of schedules: one card for every curve, drawn by the expression under it.

The expressions are those of opt-scheduler's own picture, `packages/opt-scheduler/docs/gallery.py`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import opt_scheduler
from opt_scheduler import Schedule, as_schedule

SOURCE = Path(__file__).parents[2] / "packages/opt-scheduler/docs/gallery.py"
STEPS = 120
WIDTH = 280
HEIGHT = 120
LEFT = 26
BOTTOM = 18
TOP = 8
# Readable on white and on a dark page: each has a contrast of at least 3.7 with both.
TEXT = "#787878"
CURVE = "#4c74d9"


def write(folder: Path) -> None:
    """Write `schedules.md`, a grid of cards, and `schedules/NAME.svg` for each card."""
    (folder / "schedules").mkdir()
    cards = []
    for name, expression in expressions().items():
        schedule = as_schedule(eval(expression, vars(opt_scheduler).copy()))
        (folder / "schedules" / f"{name}.svg").write_text(svg(name, schedule))
        cards.append(
            f":::{{grid-item-card}} {name}\n```{{image}} /generated/schedules/{name}.svg\n:alt: The curve of {name}\n"
            f":width: 100%\n```\n`{expression}`\n:::\n"
        )
    (folder / "schedules.md").write_text("\n".join(["::::{grid} 1 2 2 2\n:gutter: 2\n", *cards, "::::\n"]))


def expressions() -> dict[str, str]:
    """The expression of every panel, by name."""
    for node in ast.parse(SOURCE.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXPRESSIONS":
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    raise LookupError(f"{SOURCE} assigns no EXPRESSIONS")


def svg(name: str, schedule: Schedule) -> str:
    """The curve over `STEPS` steps, for values from 0 to 1."""
    points = " ".join(f"{_x(i / 4):.1f},{_y(schedule(i / 4)):.1f}" for i in range(4 * STEPS + 1))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" fill="{TEXT}" '
            'font-family="system-ui, sans-serif" font-size="10">',
            f"<title>{name}</title>",
            *_axes(),
            f'<polyline points="{points}" fill="none" stroke="{CURVE}" stroke-width="2"/>',
            "</svg>\n",
        ]
    )


def _axes() -> Iterator[str]:
    yield f'<path d="M{_x(0)},{_y(1)}V{_y(0)}H{_x(STEPS)}" fill="none" stroke="{TEXT}"/>'
    for value in (0, 0.5, 1):
        yield f'<text x="{LEFT - 5}" y="{_y(value) + 3.5}" text-anchor="end">{value:g}</text>'
    for step in (0, 50, 100):
        yield f'<text x="{_x(step)}" y="{HEIGHT - 4}" text-anchor="middle">{step}</text>'


def _x(step: float) -> float:
    return LEFT + step * (WIDTH - LEFT - 8) / STEPS


def _y(value: float) -> float:
    return TOP + (1 - value) * (HEIGHT - TOP - BOTTOM)
