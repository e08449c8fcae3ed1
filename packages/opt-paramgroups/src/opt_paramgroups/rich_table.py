"""The table of parameter groups in colour: the one file that needs the `rich` extra."""

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
        # A key's label may hold square brackets, which rich would take for a style.
        table.add_row(*(cell.replace("[", r"\[") for cell in cells(row)))
    return table


def print_rich(rows: Sequence[GroupRow]) -> None:
    """The table on the terminal."""
    Console().print(as_rich(rows))
