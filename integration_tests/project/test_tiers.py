"""Samples of grids hold every pair of values, and a test that no session runs is reported."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import outcomes
import pytest
from tiers import covering

EXTRA = "extra is not installed"
AT_NIGHT = "Skipped: runs every night: nox -s nightly"


def test_what_no_run_runs_is_named_with_the_reason_of_its_skip(tmp_path: Path) -> None:
    skipped = {"a.py::marked": EXTRA, "a.py::forgotten": EXTRA, "b.py": EXTRA, "a.py::slow": AT_NIGHT}
    alone = {"ran": ["a.py::plain"], "skipped": skipped}
    with_extra = {"ran": ["a.py::marked", "b.py::marked"], "skipped": {}}
    assert outcomes.never_ran([alone, with_extra]) == {"a.py::forgotten": EXTRA}
    for run, status in ((alone, 1), (with_extra, 0)):  # of the command
        (tmp_path / "run.json").write_text(json.dumps(run))
        assert subprocess.run([sys.executable, outcomes.__file__, str(tmp_path / "run.json")]).returncode == status


def test_a_test_of_the_night_runs_at_night_only(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("import pytest\n@pytest.mark.nightly\ndef test_slow(): pass\n")
    for option, outcome in (("-q", "1 skipped"), ("--nightly", "1 passed")):
        command = [sys.executable, "-m", "pytest", "-p", "outcomes", option, str(tmp_path)]
        ran = subprocess.run(command, cwd=Path(outcomes.__file__).parent, capture_output=True, text=True)
        assert outcome in ran.stdout


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_a_sample_holds_every_combination_of_values(strength: int) -> None:
    cases = [case for case in itertools.product(range(3), "abcd", (True, False), range(5)) if case[0] != case[3]]

    def combinations(some: list[tuple[object, ...]]) -> set[object]:
        return {chosen for case in some for chosen in itertools.combinations(enumerate(case), strength)}

    chosen = covering(cases, enumerate, strength=strength)
    assert combinations(chosen) == combinations(cases)
    assert len(chosen) <= len(cases) / 2
