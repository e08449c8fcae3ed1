"""The package as a whole: what its imports load, its names, and the examples and tables of its documents."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from elementwise_works import NEEDS_COMPILER

import opt_kernels
from opt_kernels.formulas import FORMULAS, Formula
from opt_kernels.optim import AdamW
from opt_kernels.rules import elementwise

SOURCE = Path(opt_kernels.__file__).parent
LATE = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "triton")


@pytest.mark.parametrize("program", ["import opt_kernels", "from opt_kernels import AdamW, Muon, Rule"])
def test_imports_load_no_compiler_and_no_dtensors(program: str) -> None:
    late = "assert 'opt_kernels.optim' not in sys.modules; " if program == "import opt_kernels" else ""
    script = (  # public names are imported at their first use
        f"import sys, torch; before = set(sys.modules); {program}; {late}"
        f"loaded = [name for name in {LATE} if name in sys.modules and name not in before]; assert not loaded, loaded; "
        "assert 'AdamW' in dir(sys.modules['opt_kernels'])"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_no_two_classes_have_one_name() -> None:
    """A name that two modules give to different things is read wrongly in one of them."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in SOURCE.rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file.relative_to(SOURCE).as_posix())
    assert not {name: files for name, files in places.items() if len(files) > 1}


# --- the README -------------------------------------------------------------------------------------------------------

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[1] for block in BLOCKS])
def test_an_example_runs(block: str) -> None:
    exec(compile(block, "README.md", "exec"), {})


def test_the_states_have_the_bytes_that_the_table_says() -> None:
    def bytes_of(**options: object) -> float:
        param = torch.nn.Parameter(torch.zeros(128, 100, dtype=torch.bfloat16))
        param.grad = torch.zeros_like(param)
        optimizer = AdamW([param], **options)  # type: ignore[arg-type]
        optimizer.step()
        state = optimizer.state[param]
        num_bytes: int = sum(t.numel() * t.itemsize for name, t in state.items() if name != "step")
        return num_bytes / param.numel()

    narrow = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
    half = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    sizes = [
        bytes_of(mains="float32"),
        bytes_of(mains="remainder", **half),
        bytes_of(mains="remainder", **narrow),
        bytes_of(stochastic_rounding=True, **narrow),
    ]
    rows = [line for line in README.splitlines() if line.startswith(("| `mains=", "| no main"))]
    assert [f"{float(row.split('|')[2]):.2f}" for row in rows] == [f"{size:.2f}" for size in sizes]


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS.keys())
def test_the_table_of_rules_has_every_rule_with_its_states_and_bytes(formula: Formula) -> None:
    def bytes_of(**dtypes: torch.dtype) -> float:
        main = torch.empty(12800)
        num_bytes = sum(t.numel() * t.itemsize for t in elementwise(formula, **dtypes).init_state(main).values())
        return num_bytes / main.numel()

    eight = {f"{state.name}_dtype": torch.int8 if state.signed else torch.uint8 for state in formula.states}
    names = ", ".join(state.name for state in formula.states)
    row = f"| `{formula.title}` | {names} | {bytes_of():g} | {bytes_of(**eight):.2f} |"
    assert row in README.splitlines(), f"write this row to the table of README.md: {row}"


# --- docs/bits.md -----------------------------------------------------------------------------------------------------

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
@NEEDS_COMPILER
@pytest.mark.parametrize(("name", "format"), [("sgd", "float32"), ("lion", "8-bit states"), ("signum", "e5m2 states")])
def test_cells_made_again_are_those_of_the_page(name: str, format: str) -> None:
    pytest.importorskip("triton")
    formula = FORMULAS[name]
    column = rows()["rule"].index(format)
    assert script().cell(formula, format) == rows()[formula.title][column]
