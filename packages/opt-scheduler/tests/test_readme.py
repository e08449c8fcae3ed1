"""The README's code runs from top to bottom, and its picture is what the code prints."""

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from opt_scheduler import get_schedule
from opt_scheduler.__main__ import main

README = Path(__file__).parents[1] / "README.md"
pytestmark = pytest.mark.skipif(not README.exists(), reason="the tests were copied without the README")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def runs(block: str) -> bool:
    """Whether everything that the block imports is installed: torch and optax are optional."""
    imported = re.findall(r"^(?:import|from) (\w+)", block, flags=re.MULTILINE)
    return all(importlib.util.find_spec(name) is not None for name in imported)


@pytest.mark.needs_extra
def test_its_code_runs_and_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    python = blocks("python")
    assert len(python) == 10
    assert sum(not runs(block) for block in python) <= 2
    namespace: dict[str, Any] = {}
    for block in filter(runs, python):
        exec(compile(block, str(README), "exec"), namespace)
    _, picture = sorted(blocks("text"), key=lambda text: "┤" in text)
    assert capsys.readouterr().out == "[0.0005, 5e-05]\n" + picture
    assert namespace["lr"](250) == pytest.approx(1.5e-4)
    assert namespace["branch"](4_400) == 0.0
    assert namespace["ninety_epochs"].length == 90 * 196
    assert namespace["by_tokens"].length == pytest.approx(1e12 / 256 / 4_096)
    assert namespace["plateau"].scale == 0.5
    assert namespace["optimizer"].param_groups[0]["lr"] == namespace["scheduler"].lr_at(256)


def test_it_lists_the_names_as_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = [line.removesuffix("...") for line in min(blocks("text"), key=lambda text: "┤" in text).splitlines()]
    listed = capsys.readouterr().out.splitlines()
    assert len(shown) == len(listed) - 4  # the names of HF transformers are not repeated
    assert [line for line, full in zip(shown, listed, strict=False) if not full.startswith(line)] == []


def test_its_file_is_read() -> None:
    (toml,) = blocks("toml")
    assert get_schedule(**tomllib.loads(toml)["lr"])(500) == pytest.approx(5e-4)
