"""The table of parameter groups in colour. Needs the `rich` extra."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from opt_paramgroups.table import GroupRow, cells, headings


def as_rich(rows: Sequence[GroupRow]) -> Table:
    """A rich table, for a console."""
    table = Table(title="parameter groups")
    for heading in headings():
        table.add_column(heading, overflow="fold")
    for row in rows:
        # rich would read square brackets in the label of a key as markup.
        table.add_row(*(cell.replace("[", r"\[") for cell in cells(row)))
    return table


def print_rich(rows: Sequence[GroupRow]) -> None:
    """The table on the terminal."""
    Console().print(as_rich(rows))
