"""Ray Train carries a run: a worker is killed with SIGKILL, and the restarted run ends like the uninterrupted one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
EXAMPLE = Path(__file__).parents[2] / "examples/train_on_ray.py"
LAST = "checkpoints/step-000000012"


def run(directory: Path, *options: str) -> str:
    """What the example and its workers print."""
    command = [sys.executable, str(EXAMPLE), "--dir", str(directory), *options]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout + finished.stderr


def test_a_run_whose_worker_is_killed_ends_like_the_whole_one(tmp_path: Path) -> None:
    printed = run(tmp_path / "killed", "--kill")
    assert "begins after step 0" in printed
    assert "begins after step 3" in printed or "begins after step 6" in printed  # the newest that was complete
    run(tmp_path / "whole")
    ends = [str(tmp_path / name / LAST) for name in ("killed", "whole")]
    compared = subprocess.run([sys.executable, "-m", "opt_checkpoint", "diff", *ends], check=False)
    assert compared.returncode == 0
