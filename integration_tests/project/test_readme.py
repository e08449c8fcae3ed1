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
