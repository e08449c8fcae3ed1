"""A test that no session runs is reported: skipped everywhere, or deselected where its file can be imported."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import outcomes

SUPPORT = Path(outcomes.__file__).parent
EXAMPLE = """
import pytest
WITH_EXTRA = {with_extra}
def test_plain(): pass
@pytest.mark.skipif(not WITH_EXTRA, reason="extra is not installed")
@pytest.mark.needs_extra
def test_marked(): pass
@pytest.mark.skipif(not WITH_EXTRA, reason="extra is not installed")
def test_forgotten(): pass
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_backends(backend):
    if backend == "triton" and not WITH_EXTRA: pytest.skip("extra is not installed")
@pytest.mark.xfail
def test_known(): assert False
@pytest.mark.nightly
def test_slow(): pass
"""
FILE = """
import pytest
if not {with_extra}: pytest.skip("extra is not installed", allow_module_level=True)
@pytest.mark.needs_extra
def test_marked(): pass
def test_forgotten(): pass
"""
ALL_MARKED = FILE.replace("def test_forgotten", "@pytest.mark.needs_extra\ndef test_forgotten")


def record(folder: Path, name: str, *options: str, with_extra: bool) -> dict[str, Any]:
    """What a run of pytest over the three files records."""
    for file, text in {"test_example.py": EXAMPLE, "test_file.py": FILE, "test_whole.py": ALL_MARKED}.items():
        (folder / file).write_text(text.format(with_extra=with_extra))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        "-p",
        "outcomes",
        f"--outcomes={name}.json",
        *options,
        ".",
    ]
    environment = {"PYTHONPATH": str(SUPPORT), "PYTHONDONTWRITEBYTECODE": "1", "PATH": ""}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def test_what_no_run_selects_is_named_with_the_reason_of_its_skip(tmp_path: Path) -> None:
    alone = record(tmp_path, "alone", with_extra=False)
    tests = {f"test_example.py::test_{name}" for name in ("marked", "forgotten", "backends[triton]")}
    assert outcomes.never_ran([alone]).keys() == tests | {"test_file.py", "test_whole.py"}
    together = record(tmp_path, "together", "-m", "needs_extra", with_extra=True)
    left = outcomes.never_ran([alone, together])
    assert left.keys() == {"test_example.py::test_forgotten", "test_file.py::test_forgotten"}
    assert all("extra is not installed" in reason for reason in left.values())
    assert "test_example.py::test_slow" in record(tmp_path, "night", "--nightly", with_extra=True)["ran"]
