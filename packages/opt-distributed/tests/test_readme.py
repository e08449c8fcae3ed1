"""What the README shows runs, and prints what the README says."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)


def test_the_readmes_examples_run_and_print_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    programs = [code for language, code in BLOCKS if language == "python"]
    assert len(programs) == 2
    scope: dict[str, object] = {}
    exec(programs[0], scope)
    assert capsys.readouterr().out == "1832 elements, padded to 2048\n"
    exec(programs[1], scope)
    assert capsys.readouterr().out in [text for language, text in BLOCKS if language == ""]
