"""The import layers hold, and the checks notice when one is broken."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
NO_DISTRIBUTED = ("opt-config", "opt-paramgroups", "opt-kernels", "opt-scheduler")
# The one file of a package that may tell DTensors from tensors.
RECOGNISES_DTENSORS = "dtensor.py"


def imports_of(source: str) -> set[str]:
    """Dotted names that a module's text imports, or reaches as attributes of `torch`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
    return found


def knows_distributed(source: str) -> bool:
    return any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in imports_of(source))


@pytest.mark.parametrize("package", NO_DISTRIBUTED)
def test_packages_below_the_step_do_not_know_torch_distributed(package: str) -> None:
    for path in (ROOT / "packages" / package / "src").rglob("*.py"):
        if path.name != RECOGNISES_DTENSORS:
            assert not knows_distributed(path.read_text()), f"{path} knows torch.distributed"


@pytest.mark.parametrize(
    "source",
    ["import torch.distributed as dist", "from torch import distributed", "import torch\ntorch.distributed.barrier()"],
)
def test_every_way_to_reach_torch_distributed_is_noticed(source: str) -> None:
    assert knows_distributed(source)


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """The contracts of `folder`'s pyproject.toml, checked against the packages of `folder`."""
    pytest.importorskip("importlinter", reason="the contracts are checked where the lint group is installed")
    paths = [str(path) for path in folder.glob("packages/*/src")]
    check = "from importlinter.cli import lint_imports_command as check; check(['--no-cache'])"
    code = f"import sys; sys.path[:0] = {paths!r}; {check}"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(package / "src", tmp_path / "packages" / package.name / "src")
    return tmp_path


def test_the_contracts_hold(copy: Path) -> None:
    done = lint_imports(copy)
    assert done.returncode == 0, done.stdout


UPWARDS = {
    "opt-config/src/opt_config/errors.py": "import opt_paramgroups",
    "opt-kernels/src/opt_kernels/__init__.py": "import opt_config",
    "opt-checkpoint/src/opt_checkpoint/errors.py": "import opt_kernels",
    "opt-distributed/src/opt_distributed/layout/layout.py": "import opt_stack\nimport opt_distributed.step",
    "opt-scheduler/src/opt_scheduler/override.py": "import torch",
}
BROKEN = (
    "Packages import downwards",
    "Kernels and checkpoints stand",
    "The layers of opt_distributed",
    "Schedules need",
)


def test_upward_imports_break_them(copy: Path) -> None:
    for module, line in UPWARDS.items():
        path = copy / "packages" / module
        path.write_text(path.read_text() + f"\n{line}\n")
    done = lint_imports(copy)
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
