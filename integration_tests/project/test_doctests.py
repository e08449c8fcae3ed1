"""The examples in docstrings run and are true, and so are those of the READMEs of opt-config and opt-paramgroups."""

import doctest
import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
MODULES = [path for path in sorted(PACKAGES.glob("*/src/**/*.py")) if ">>> " in path.read_text()]
NEEDS = {"lr_scheduler": "torch", "keras_callback": "keras"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_the_examples_of_a_module_are_true(path: Path) -> None:
    if importlib.util.find_spec(needed := NEEDS.get(path.stem, "doctest")) is None:
        pytest.skip(f"the adapter needs {needed}")
    name = ".".join(path.relative_to(PACKAGES).with_suffix("").parts[2:]).removesuffix(".__init__")
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize("package", ["opt-config", "opt-paramgroups"])
def test_the_programs_of_a_package_print_what_its_page_says(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (PACKAGES / package / "README.md").read_text()
    programs = "\n".join(re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL))
    scope: dict[str, Any] = {}
    exec(programs, scope)
    # The comment after a print, the lines of comments alone, or a block of text.
    shown = re.findall(r"^(?:print\(.*\)  )?# (.*)$", programs, flags=re.MULTILINE)
    shown += [
        line for block in re.findall(r"```text\n(.*?)```", readme, flags=re.DOTALL) for line in block.splitlines()
    ]
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [line.rstrip() for line in shown]
