"""The README's examples run."""

import re
from pathlib import Path

import pytest
import torch

from opt_kernels.formulas import FORMULAS, Formula
from opt_kernels.optim import AdamW
from opt_kernels.rules import elementwise

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
