"""What the README shows runs, and prints what it says."""

import re
from pathlib import Path
from typing import Any

import pytest

from opt_stack.__main__ import main

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return found


def test_the_programs_run_and_the_first_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    for number, block in enumerate(blocks("python")):
        exec(block, scope)
        if number == 0:
            assert capsys.readouterr().out == blocks("text")[0]
            assert scope["success"] is True
    assert scope["optimizer"].plan.config.optimizer == "adadelta"


def test_the_command_prints_what_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.toml"
    path.write_text('optimizer = "muon"\nlr = 3e-4\nweight_decay = 0.1\n')
    assert main(["plan", str(path)]) == 0
    assert capsys.readouterr().out in README
