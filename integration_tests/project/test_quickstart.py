"""The quickstart: stopped and resumed runs agree, it draws its pictures, and what it suggests works."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nightly
EXAMPLE = Path(__file__).parents[2] / "examples/quickstart.py"
STEPS = 6


def run(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), "--batch", "6", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def log(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "quickstart"


@pytest.fixture(scope="module")
def ran(directory: Path) -> subprocess.CompletedProcess[str]:
    """Muon's, which cuts some parameters and keeps others whole."""
    pytest.importorskip("matplotlib")
    return run("--dir", directory, "--steps", STEPS, "--rule", "muon")


def test_the_resumed_run_ends_where_the_uninterrupted_one_does(ran: Any, directory: Path) -> None:
    assert ran.stderr.strip().splitlines()[-1] == "the model did not beat a bigram"  # after six steps
    assert re.search(r"resumed on 2 ranks: 3 steps, largest difference of loss 0.00e\+00", ran.stdout)
    resumed = log(directory / "resumed.json")
    whole = log(directory / "uninterrupted/whole.json")
    assert resumed["log"] == whole["log"][STEPS // 2 :]
    assert resumed["bits"] == whole["bits"]
    assert all((directory / name).read_bytes().startswith(b"\x89PNG") for name in ("loss.png", "schedule.png"))


def test_resume_on_other_ranks_keeps_the_rule_of_the_run(ran: Any, directory: Path) -> None:
    again = run("--dir", directory, "--resume", "--ranks", 1, "--more", 2)
    assert again.returncode == 0, again.stderr[-3000:]
    resumed = log(directory / "resumed.json")
    assert resumed["rule"] == "muon"
    assert [row["step"] for row in resumed["log"]] == [STEPS, STEPS + 1]
    assert "of the checkpoint replaces" not in again.stderr  # the schedule is the one that was saved


def test_a_folder_of_another_program_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    import quickstart

    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(quickstart, "preload", lambda: None)  # it changes how this process starts others
    monkeypatch.setattr(quickstart, "train", None)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--dir", str(tmp_path)])
    with pytest.raises(SystemExit, match="is neither empty nor a folder of an earlier quickstart"):
        quickstart.main()
    assert (tmp_path / "checkpoints").exists()
