"""The GPU command on a machine without a GPU: the rehearsal runs on a CPU, and a plain run reports that nothing ran."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

COMMAND_FOLDER = Path(__file__).parents[1]
COMMAND = [sys.executable, str(COMMAND_FOLDER / "gpu_all.py")]


def played(*options: str) -> subprocess.CompletedProcess[str]:
    # One thread: the interpreter's programs run one after the other anyway.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, env=environment, check=False)


def test_every_step_can_be_rehearsed_on_a_cpu() -> None:
    finished = played("--rehearsal")
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    for figure in (
        "adam fp32, share of copy",
        "host time of a step, rule",
        "host time of a step, drop-in",
        "muon around the products, share of copy",
        "torch.bmm / syrk",
        "Householder / CholeskyQR2",
    ):
        assert figure in finished.stdout


def test_the_tests_of_a_device_include_sweeps_and_drop_in_optimizers() -> None:
    sys.path.insert(0, str(COMMAND_FOLDER))
    from gpu_all import tests_on_a_device

    names = {path.stem for path in tests_on_a_device()}
    assert {"test_triton_sweeps", "test_triton_muon", "test_drop_in_devices"} <= names
    assert "test_cpp" not in names


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    finished = played("--results", str(tmp_path))
    assert finished.returncode == 0
    assert "no GPU" in finished.stdout
    assert not list(tmp_path.iterdir())
