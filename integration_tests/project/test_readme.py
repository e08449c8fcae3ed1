"""What the README shows runs."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_readmes_training_loop_trains() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    exec(code, namespace)
    assert namespace["success"] is True
    assert namespace["scheduler"].num_steps == 20  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["quickstart", "tests"])
def test_its_two_commands_name_sessions_that_exist(name: str) -> None:
    assert f"python -m pip install nox uv && python -m nox -s {name}" in README.read_text()
    assert f"def {name}(session" in (README.parent / "noxfile.py").read_text()


ROOT = README.parent
PACKAGES = ("opt-config", "opt-distributed", "opt-kernels", "opt-paramgroups", "opt-scheduler", "opt-stack")
READMES = [ROOT / "packages" / name / "README.md" for name in PACKAGES]
EXCEPT = {"bits.md", "promises.md", "architecture.md"}  # tables, of which two are written by programs


def test_a_package_s_readme_has_at_most_1500_words() -> None:
    assert {path.parent.name: words for path in READMES if (words := len(path.read_text().split())) > 1500} == {}


def test_no_line_of_a_page_is_longer_than_120_characters() -> None:
    docs = [path for path in (ROOT / "docs").rglob("*.md") if "generated" not in path.parts]
    pages = [README, ROOT / "CONTRIBUTING.md", *READMES, *(path for path in docs if path.name not in EXCEPT)]
    long = [
        f"{page.relative_to(ROOT)}: {line[:60]}"
        for page in pages
        for line in page.read_text().splitlines()
        if len(line) > 120
    ]
    assert long == []
