"""A test that no session runs is reported: skipped everywhere, or deselected where its file can be imported."""

import json
import subprocess
import sys
from pathlib import Path

import outcomes
from outcomes import never_ran

EXTRA, AT_NIGHT = "extra is not installed", "Skipped: runs every night: nox -s nightly"


def test_what_no_run_selects_is_named_with_the_reason_of_its_skip(tmp_path: Path) -> None:
    alone = {
        "ran": ["a.py::plain"],
        "skipped": {"a.py::marked": EXTRA, "a.py::forgotten": EXTRA, "b.py": EXTRA, "a.py::slow": AT_NIGHT},
        "deselected": [],
    }
    with_extra = {"ran": ["a.py::marked", "b.py::marked"], "skipped": {}, "deselected": ["a.py::plain", "b.py::other"]}
    found = never_ran([alone])
    assert found == dict.fromkeys(("a.py::marked", "a.py::forgotten", "b.py"), EXTRA)
    assert never_ran([alone, with_extra]) == dict.fromkeys(("a.py::forgotten", "b.py::other"), EXTRA)
    for run, status in ((alone, 1), (alone | {"skipped": {}}, 0)):  # of the command
        (tmp_path / "run.json").write_text(json.dumps(run))
        assert subprocess.run([sys.executable, outcomes.__file__, str(tmp_path / "run.json")]).returncode == status


def test_a_test_of_the_night_runs_at_night_only(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("import pytest\n@pytest.mark.nightly\ndef test_slow(): pass\n")
    environment = {"PYTHONPATH": str(Path(outcomes.__file__).parent), "PATH": ""}
    for option, outcome in (("-q", "1 skipped"), ("--nightly", "1 passed")):
        command = [sys.executable, "-m", "pytest", "-p", "outcomes", option, "."]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert outcome in ran.stdout
