"""The package as a whole: what its imports load, its names, and the examples and tables of its documents."""

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from elementwise_works import NEEDS_COMPILER

from opt_kernels.formulas import FORMULAS, Formula
from opt_kernels.optim import AdamW
from opt_kernels.rules import elementwise

LATE = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "triton")


def test_imports_load_no_compiler_and_no_dtensors() -> None:
    script = (  # public names are imported at their first use
        "import sys, torch; before = set(sys.modules); import opt_kernels; "
        "assert 'opt_kernels.optim' not in sys.modules; "
        "assert 'AdamW' in dir(opt_kernels); from opt_kernels import AdamW, Muon, Rule; "
        f"loaded = [name for name in {LATE} if name in sys.modules and name not in before]; assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


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
        return sum(t.nbytes for name, t in optimizer.state[param].items() if name != "step") / param.numel()

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
def test_the_table_of_rules_has_all_with_their_states_and_bytes(formula: Formula) -> None:
    def bytes_of(**dtypes: torch.dtype) -> float:
        state = elementwise(formula, **dtypes).init_state(torch.empty(12800))
        return sum(t.nbytes for t in state.values()) / 12800

    eight = {f"{state.name}_dtype": torch.int8 if state.signed else torch.uint8 for state in formula.states}
    names = ", ".join(state.name for state in formula.states)
    row = f"| `{formula.title}` | {names} | {bytes_of():g} | {bytes_of(**eight):.2f} |"
    assert row in README.splitlines(), f"write this row to the table of README.md: {row}"


ROOT = Path(__file__).resolve().parents[3]


def script() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "packages/opt-kernels/benchmarks/bit_table.py")))


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
