"""The import layers hold, and the checks notice when one is broken."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_DISTRIBUTED = ("opt-config", "opt-paramgroups", "opt-kernels", "opt-scheduler")
RECOGNISES_DTENSORS = "dtensor.py"  # the one file of a package that may tell DTensors from tensors


def knows_distributed(source: str) -> bool:
    """Whether a module's text imports torch.distributed, or reaches it as an attribute of `torch`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return any(f"{name}.".startswith("torch.distributed.") for name in found)


def test_packages_below_the_step_do_not_know_torch_distributed() -> None:
    paths = [path for package in NO_DISTRIBUTED for path in (ROOT / "packages" / package / "src").rglob("*.py")]
    assert len(paths) > 20
    assert [path for path in paths if path.name != RECOGNISES_DTENSORS and knows_distributed(path.read_text())] == []
    assert knows_distributed("import torch.distributed as dist")
    assert knows_distributed("from torch import distributed")
    assert knows_distributed("import torch\ntorch.distributed.barrier()")


UPWARDS = {
    "opt-config/src/opt_config/errors.py": "import opt_paramgroups",
    "opt-kernels/src/opt_kernels/__init__.py": "import opt_config",
    "opt-checkpoint/src/opt_checkpoint/errors.py": "import opt_kernels",
    "opt-distributed/src/opt_distributed/layout/layout.py": "import opt_stack\nimport opt_distributed.step",
    "opt-scheduler/src/opt_scheduler/override.py": "import torch",
}
BROKEN = "Packages import downwards", "Kernels and checkpoints stand", "The layers of opt_distributed", "Schedules need"


def test_the_contracts_hold_and_upward_imports_break_them(tmp_path: Path) -> None:
    pytest.importorskip("importlinter", reason="the contracts are checked where the lint group is installed")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for source in ROOT.glob("packages/*/src"):
        shutil.copytree(source, tmp_path / source.relative_to(ROOT))
    paths = [str(path) for path in tmp_path.glob("packages/*/src")]
    code = f"import sys; sys.path[:0] = {paths!r}; from importlinter.cli import lint_imports_command as check"
    command = [sys.executable, "-c", f"{code}; check(['--no-cache'])"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for module, line in UPWARDS.items():
        path = tmp_path / "packages" / module
        path.write_text(path.read_text() + f"\n{line}\n")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0, done.stdout
    broken = [line for line in done.stdout.splitlines() if " BROKEN" in line]
    assert [name for name in BROKEN if not any(line.startswith(name) for line in broken)] == [], done.stdout


def test_the_scheduler_brings_in_the_standard_library_only() -> None:
    # What was there before counts out: an environment may load modules of its own at start.
    code = (
        "import sys; before = set(sys.modules); import opt_scheduler;"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before} - {'opt_scheduler'};"
        "print(sorted(new - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
