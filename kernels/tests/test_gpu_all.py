"""The GPU command on a machine without a GPU: the rehearsal runs on a CPU, and a plain run reports that nothing ran."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

COMMAND = [sys.executable, str(Path(__file__).parents[1] / "gpu_all.py")]


def played(*options: str) -> subprocess.CompletedProcess[str]:
    # One thread: the interpreter's programs run one after the other anyway.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, env=environment, check=False)


def test_every_step_can_be_rehearsed_on_a_cpu() -> None:
    finished = played("--rehearsal")
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    for figure in ("adam fp32, share of copy", "host time of a step, drop-in", "torch.bmm / syrk", "CholeskyQR2"):
        assert figure in finished.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    finished = played("--results", str(tmp_path))
    assert finished.returncode == 0
    assert "no GPU" in finished.stdout
    assert not list(tmp_path.iterdir())
