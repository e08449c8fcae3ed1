"""Pictures of the site as SVG, each for a light and a dark page: who holds what under each kind of parallelism.

The shares of ZeRO-1 and layer-wise sharding come from the planners that training uses.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from opt_distributed import ParamShape, flat_layout, whole_layout
from opt_paramgroups import ParamId

RANKS = 4
SHAPES = {"embedding": (64, 16), "attention": (48, 16), "mlp.up": (64, 16), "mlp.down": (16, 64), "head": (64, 16)}
EXPERTS = {"attention": (64, 24), **{f"expert {i}": (64, 12) for i in range(RANKS)}}
HUES = ("#4c6ef5", "#12b886", "#fab005", "#e64980", "#7950f2", "#15aabf")
THEMES = {
    "light": {"text": "#1f2329", "empty": "#eef0f4", "line": "#c9ced8"},
    "dark": {"text": "#e6e8ec", "empty": "#23272f", "line": "#444b57"},
}
LEFT = 128
WIDTH = 560
BAR = 16
GAP = 4
TOP = 46

Span = tuple[float, float]  # of a parameter, as fractions of its elements
Held = Mapping[str, Sequence[Span]]  # by parameter; parameters that are absent are not held


@dataclass(frozen=True)
class Picture:
    """For every rank, which part of each parameter it holds: as parameter, gradient and optimizer state."""

    name: str
    caption: str
    shapes: Mapping[str, tuple[int, ...]]
    parameters: Sequence[Held]
    gradients: Sequence[Held]
    state: Sequence[Held]


def write(folder: Path) -> None:
    """Write every picture as NAME-light.svg and NAME-dark.svg."""
    for picture in pictures():
        for theme in THEMES:
            (folder / f"{picture.name}-{theme}.svg").write_text(svg(picture, theme))


def pictures() -> Iterator[Picture]:
    everything = [{name: [(0.0, 1.0)] for name in SHAPES}] * RANKS
    flat, whole = (_owned(planner) for planner in (flat_layout, whole_layout))
    rows = [{name: [(r / RANKS, (r + 1) / RANKS)] for name in SHAPES} for r in range(RANKS)]
    halves = [{name: [((r % 2) / 2, (r % 2 + 1) / 2)] for name in SHAPES} for r in range(RANKS)]
    experts = [{"attention": [(0.0, 1.0)], f"expert {r}": [(0.0, 1.0)]} for r in range(RANKS)]
    expert_state = [{"attention": [(r / RANKS, (r + 1) / RANKS)], f"expert {r}": [(0.0, 1.0)]} for r in range(RANKS)]
    yield Picture("replicated", "Data parallel, replicated", SHAPES, everything, everything, everything)
    yield Picture("zero1", "ZeRO-1: state is cut anywhere", SHAPES, everything, everything, flat)
    yield Picture("layer-wise", "Layer-wise: state of whole matrices", SHAPES, everything, everything, whole)
    yield Picture("fsdp2", "FSDP2: every matrix is cut by rows", SHAPES, rows, rows, rows)
    yield Picture("tensor-parallel", "Tensor parallel 2 x data parallel 2", SHAPES, halves, halves, halves)
    yield Picture(
        "experts", "Experts on ranks of their own, ZeRO-1 for the rest", EXPERTS, experts, experts, expert_state
    )


def _owned(planner: object) -> list[Held]:
    """What each rank owns of `SHAPES` under a layout planner of opt-distributed."""
    ids = {ParamId(0, name): name for name in SHAPES}
    layout = planner([ParamShape(id=id, shape=SHAPES[name]) for id, name in ids.items()], num_shards=RANKS)  # type: ignore[operator]
    held: list[Held] = []
    for rank in range(RANKS):
        spans: dict[str, list[Span]] = {}
        for _, piece in layout.owned(rank):
            name = ids[piece.id]
            numel = SHAPES[name][0] * SHAPES[name][1]
            spans.setdefault(name, []).append((piece.of_param.start / numel, piece.of_param.stop / numel))
        held.append(spans)
    return held


def svg(picture: Picture, theme: str) -> str:
    colours = THEMES[theme]
    rank_height = 3 * (BAR + GAP) + 14
    height = TOP + RANKS * rank_height + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 12} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{colours["text"]}">',
        f"<title>{escape(picture.caption)}</title>",
        f'<text x="0" y="16" font-size="14" font-weight="600">{escape(picture.caption)}</text>',
        *_names(picture),
    ]
    for rank in range(RANKS):
        top = TOP + rank * rank_height
        parts.append(f'<text x="0" y="{top + BAR - 4}" font-weight="600">rank {rank}</text>')
        for row, kind in enumerate(("parameters", "gradients", "state")):
            y = top + row * (BAR + GAP)
            parts.append(f'<text x="{LEFT - 8}" y="{y + BAR - 4}" text-anchor="end">{kind}</text>')
            parts += _bar(picture.shapes, getattr(picture, kind)[rank], y, colours)
    return "\n".join([*parts, "</svg>\n"])


def _places(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[int, str, float, float]]:
    """Index, name, x and width of every parameter: widths are in proportion to elements."""
    total = sum(rows * cols for rows, cols in shapes.values())
    x = float(LEFT)
    for index, (name, (rows, cols)) in enumerate(shapes.items()):
        width = WIDTH * rows * cols / total
        yield index, name, x, width
        x += width


def _names(picture: Picture) -> Iterator[str]:
    for index, name, x, width in _places(picture.shapes):
        colour = HUES[index % len(HUES)]
        yield f'<rect x="{x + 2:.1f}" y="27" width="8" height="8" rx="2" fill="{colour}"/>'
        yield f'<text x="{x + 14:.1f}" y="35" textLength="{min(width - 18, 6.2 * len(name)):.0f}">{escape(name)}</text>'


def _bar(shapes: Mapping[str, tuple[int, ...]], held: Held, y: float, colours: Mapping[str, str]) -> Iterator[str]:
    for index, name, x, width in _places(shapes):
        yield (
            f'<rect x="{x + 1:.1f}" y="{y}" width="{width - 2:.1f}" height="{BAR}" rx="3" fill="{colours["empty"]}" '
            f'stroke="{colours["line"]}" stroke-width="0.6"/>'
        )
        for start, stop in held.get(name, ()):
            yield (
                f'<rect x="{x + 1 + start * (width - 2):.1f}" y="{y}" width="{(stop - start) * (width - 2):.1f}" '
                f'height="{BAR}" rx="3" fill="{HUES[index % len(HUES)]}"/>'
            )
