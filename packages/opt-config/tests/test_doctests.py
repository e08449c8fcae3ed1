"""The examples in docstrings and in the README run and are true."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import opt_config

MODULES = sorted(f"opt_config.{module.name}" for module in pkgutil.iter_modules(opt_config.__path__))


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert result.failed == 0


def test_there_are_docstring_examples():
    found = {name: doctest.DocTestFinder().find(importlib.import_module(name)) for name in MODULES[1:]}
    assert sum(bool(test.examples) for tests in found.values() for test in tests) >= 5


def test_readme_blocks_run_and_print_what_their_comments_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    scope: dict[str, object] = {}
    for block in blocks:
        exec(block, scope)
    # The comment after a print, and the lines of comments alone, are what is printed.
    shown = re.findall(r"^(?:print\(.*\)  )?# (.*)$", "\n".join(blocks), flags=re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == shown
