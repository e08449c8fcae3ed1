"""The table of parameter groups, as text, markdown and JSON, or in colour."""

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple


class GroupRow(NamedTuple):
    """One group as a row of the table."""

    name: str
    optimizer: str
    num_params: int
    numel: int
    dtypes: str
    lr: float | None
    min_lr: float | None
    weight_decay: float
    overrides: str  # further entries that differ from the configuration
    first_param: str


_COPIED = ("name", "optimizer", "lr", "min_lr", "weight_decay")  # columns that are entries of the group
_SHOWN_ELSEWHERE = (
    *_COPIED,
    *("params", "param_ids", "max_lr", "is_expert_parallel", "default_config", "wd_mult", "lr_mult", "is_decoupled_lr"),
)


def group_rows(param_groups: Iterable[Mapping[str, Any]]) -> list[GroupRow]:
    """Return one row per group. Counts are those of this rank."""
    return [_row(group) for group in param_groups]


def _row(group: Mapping[str, Any]) -> GroupRow:
    params = group["params"]
    ids = group["param_ids"]
    numel = sum(param.numel() for param in params)
    dtypes = " ".join(sorted({str(param.dtype).removeprefix("torch.") for param in params}))
    overrides = " ".join(f"{entry}={group[entry]}" for entry in group if entry not in _SHOWN_ELSEWHERE)
    copied = {name: group[name] for name in _COPIED}
    return GroupRow(
        num_params=len(params),
        numel=numel,
        dtypes=dtypes,
        overrides=overrides,
        first_param=str(ids[0]) if ids else "",
        **copied,
    )


def cells(row: GroupRow) -> list[str]:
    """Return a row as text: thousands separated, unset values as dashes."""
    return [_cell(value) for value in row]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def headings() -> list[str]:
    """Return the names of the columns."""
    return [field.replace("num_", "").replace("_", " ") for field in GroupRow._fields]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for each row, with columns aligned by spaces."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def as_text(rows: Sequence[GroupRow]) -> str:
    """Return columns aligned by spaces."""
    return "\n".join(aligned([headings(), *map(cells, rows)]))


def as_markdown(rows: Sequence[GroupRow]) -> str:
    """Return a markdown table; `|` within a name is escaped."""
    lines = [headings(), ["---"] * len(GroupRow._fields), *map(cells, rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def as_json(rows: Sequence[GroupRow]) -> str:
    """Return a JSON list of objects, one for each group."""
    return json.dumps([row._asdict() for row in rows], indent=2)


def as_rich(rows: Sequence[GroupRow]) -> Any:
    """Return a `rich.table.Table`, for a console. Needs the `rich` extra."""
    table = import_module("rich.table").Table(title="parameter groups")
    for heading in headings():
        table.add_column(heading, overflow="fold")
    for row in rows:
        # rich would read square brackets in the label of a key as markup.
        table.add_row(*(cell.replace("[", r"\[") for cell in cells(row)))
    return table
