"""No module imports torch.distributed: process groups are arguments."""

import ast
from pathlib import Path

import pytest

import opt_paramgroups

SOURCES = sorted(Path(opt_paramgroups.__file__).parent.glob("*.py"))


def imported(source: str) -> set[str]:
    """Every module that a source text imports, with the names taken from it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_check_sees_such_an_import():
    for line in ("import torch.distributed as d", "from torch import distributed", "from torch.distributed import x"):
        assert any(name.startswith("torch.distributed") for name in imported(line))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_file_imports_torch_distributed(path):
    assert not {name for name in imported(path.read_text()) if name.startswith("torch.distributed")}
