"""What import-linter cannot see: it knows packages of others by their first name only, and no attributes."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_DISTRIBUTED = ("opt-config", "opt-paramgroups", "opt-kernels", "opt-scheduler")
RECOGNISES_DTENSORS = "dtensor.py"  # the one file of a package that may tell DTensors from tensors


def knows_distributed(source: str) -> bool:
    """Whether a module's code imports torch.distributed, or reaches it as an attribute of `torch`."""
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute)
    code = "\n".join(ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return re.search(r"torch\.distributed|from torch import .*\bdistributed", code) is not None


def test_packages_below_the_step_do_not_know_torch_distributed() -> None:
    paths = [path for package in NO_DISTRIBUTED for path in (ROOT / "packages" / package / "src").rglob("*.py")]
    assert len(paths) > 20
    assert [path for path in paths if path.name != RECOGNISES_DTENSORS and knows_distributed(path.read_text())] == []


def test_the_scheduler_brings_in_the_standard_library_only() -> None:
    # What was there before counts out: an environment may load modules of its own at start.
    code = (
        "import sys; before = set(sys.modules); import opt_scheduler;"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - {'opt_scheduler'};"
        "print(sorted(new - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("package", "slow"),
    [("opt_stack", {"sympy", "torch.distributed.checkpoint"}), ("opt_distributed", {"torch.distributed"})],
)
def test_an_import_leaves_dtensors_and_dcp_to_those_who_use_them(package: str, slow: set[str]) -> None:
    # Each takes longer than all of opt_stack.
    code = f"import sys, {package}; print(sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
