"""The examples in docstrings and in the README run and are true."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import opt_paramgroups

MODULES = sorted(module.name for module in pkgutil.iter_modules(opt_paramgroups.__path__))


@pytest.mark.parametrize("name", [name for name in MODULES if name != "__main__"])
def test_docstring_examples(name):
    assert doctest.testmod(importlib.import_module(f"opt_paramgroups.{name}")).failed == 0


def test_readme_blocks_run(capsys):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 2
    scope: dict[str, object] = {}
    for block in blocks:
        exec(block, scope)
    printed = capsys.readouterr().out.strip()
    shown = re.search(r"```text\n(.*?)```", text, flags=re.DOTALL)
    assert shown is not None
    assert printed.splitlines() == shown[1].strip().splitlines()
