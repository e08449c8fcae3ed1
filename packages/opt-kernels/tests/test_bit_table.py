"""The table of docs/bits.md lists every rule and format, and cells made again are those of the page."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.formulas import FORMULAS

ROOT = Path(__file__).resolve().parents[3]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("bit_table", ROOT / "packages/opt-kernels/benchmarks/bit_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows() -> dict[str, list[str]]:
    lines = [line for line in (ROOT / "docs/bits.md").read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_the_page_has_every_rule_and_format() -> None:
    assert (ROOT / "docs/bits.md").read_text().startswith(script().HEAD)
    listed = ["rule", "---", *(formula.title for formula in FORMULAS.values())]
    assert [*rows()] == listed, "run python packages/opt-kernels/benchmarks/bit_table.py"
    assert rows()["rule"] == list(script().FORMATS)


@pytest.mark.needs_extra
@pytest.mark.skipif(not usable(), reason="no working C++ compiler")
@pytest.mark.parametrize(("name", "format"), [("sgd", "float32"), ("lion", "8-bit states"), ("signum", "e5m2 states")])
def test_cells_made_again_are_those_of_the_page(name: str, format: str) -> None:
    pytest.importorskip("triton")
    formula = FORMULAS[name]
    column = rows()["rule"].index(format)
    assert script().cell(formula, format) == rows()[formula.title][column]
