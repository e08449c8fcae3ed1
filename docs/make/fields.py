"""Fields of dataclasses, with their defaults and the docstrings that follow them in the source."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from docstrings import markdown

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_config.unsupported_fields import UNSUPPORTED_DATA_PARALLEL_FIELDS


class Field(NamedTuple):
    """A documented field."""

    name: str
    default: str  # source text; empty if the field has none
    text: str  # Markdown


def fields_of(kind: type) -> Iterator[Field]:
    """Yield the fields that a dataclass or named tuple itself declares and documents."""
    if not (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        return
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError):
        return
    assert isinstance(tree, ast.ClassDef)
    for line, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            match after:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    default = ast.unparse(line.value) if line.value else ""
                    yield Field(line.target.id, "" if default.startswith("field(") else default, markdown(text))


def field_list(kind: type) -> list[str]:
    """The documented fields as lines of a Markdown list."""
    return [
        f"- `{field.name}{f' = {field.default}' if field.default else ''}`: {' '.join(field.text.split())}"
        for field in fields_of(kind)
    ]


def write(folder: Path) -> None:
    """Write `config_fields.md`: the fields of both configurations."""
    parts = []
    for kind in (OptimizerConfig, DistributedDataParallelConfig):
        parts += [f"## {kind.__name__}", "", *field_list(kind), ""]
    parts += ["These fields of Megatron-Core exist, and accept only their defaults:", ""]
    parts += [f"- `{name}`: {reason}" for name, reason in UNSUPPORTED_DATA_PARALLEL_FIELDS.items()]
    (folder / "config_fields.md").write_text("\n".join([*parts, ""]))
