"""The README's programs run, and what it says of the command line is true."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from opt_checkpoint.__main__ import main

README = (Path(__file__).parent.parent / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_readmes_programs_run_and_its_commands_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(PROGRAMS) == 3
    for program in PROGRAMS:
        exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    commands = re.findall(r"^optckpt (.*)$", README, re.MULTILINE)
    assert len(commands) == 7
    codes = {command: main(shlex.split(command)) for command in commands}
    assert codes.pop("diff run/step-000000004 run/step-000000005") == 1
    assert set(codes.values()) == {0}


def test_the_package_imports_only_torch_and_numpy() -> None:
    """In a fresh interpreter, none of the sibling packages is imported along."""
    code = "import sys, opt_checkpoint; print([m for m in sys.modules if m.startswith('opt_') and '.' not in m])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "['opt_checkpoint']"


@pytest.mark.parametrize("path", sorted((Path(__file__).parent.parent / "src").rglob("*.py")), ids=lambda p: p.stem)
def test_a_source_file_is_short_and_says_what_it_is(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= 400
    assert lines[0].startswith('"""')
