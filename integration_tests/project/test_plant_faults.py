"""Planted faults: one is noticed by the tests that call the changed function, or named."""

from pathlib import Path

import plant_faults
import pytest

SOURCE = """
def scaled(values: list[int], count: int = 2) -> list[int]:
    found = [value * 3 for value in values[1:] if value > 0]
    if len(found) == count:
        found.append(pow(count, 3))
    return found
"""
TEST = """
from opt_x.scaling import scaled
def test_scaled():
    assert scaled([7, 1, 2]) == [3, 6, 8]
"""


@pytest.mark.nightly
def test_the_tests_that_call_a_function_meet_its_faults_first_and_a_survivor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, tests = (tmp_path / "x/packages/opt-x" / name for name in ("src/opt_x", "tests"))
    for folder in (sources, tests):
        folder.mkdir(parents=True)
    (sources / "scaling.py").write_text(SOURCE)
    (tests / "test_a.py").write_text("def test_elsewhere(): pass")
    (tests / "test_broken.py").write_text(TEST.replace("[3, 6, 8]", "[]"))
    (tests / "test_scaling.py").write_text(TEST)
    monkeypatch.setattr(plant_faults, "copied_files", lambda root: [])
    tree = plant_faults.Tree(tmp_path / "x")
    tree.record_calls(tmp_path / "calls", 1)
    calls = plant_faults.Calls(line for file in (tmp_path / "calls").glob("*.calls") for line in file.open())
    faults = plant_faults.faults_in(SOURCE, "packages/opt-x/src/opt_x/scaling.py")
    by_text = {f.before + " -> " + f.after: f for f in faults}
    found = {}
    for text in ("value * 3 -> (value / 3)", "value > 0 -> (value >= 0)"):
        assert plant_faults.function_at(SOURCE, by_text[text].line) == "scaled"
        near, rest = calls.order(by_text[text], "scaled")
        assert {Path(test).name for test in near} == {"test_broken.py", "test_scaling.py"}
        assert [Path(test).name for test in rest] == ["test_a.py"]
        found[text] = tree.noticed_by(by_text[text], near, calls)
    assert found == {
        "value * 3 -> (value / 3)": "packages/opt-x/tests/test_scaling.py::test_scaled",
        "value > 0 -> (value >= 0)": "",
    }
