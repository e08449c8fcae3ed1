"""The GPU command on a machine without a GPU: the rehearsal runs on a CPU, and a plain run reports that nothing ran.
Steps that go wrong are played by others in their place."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = Path(__file__).parents[1] / "gpu_all.py"
COMMAND = [sys.executable, str(SCRIPT)]
STEPS = """
import os, signal, subprocess, sys, time
from dataclasses import dataclass

CHILD = "import sys, time; alive = open(sys.argv[1], 'w'); time.sleep(9); alive.write('outlived its step')"


@dataclass
class Measure:
    name: str
    value: float = 1.0
    unit: str = "1"
    goal: float | None = None
    at_most: bool = False


def gpu_name():
    return "none"


def stage_on(device):
    return device


def raises(stage):
    yield Measure("before the error")
    raise type("CompilationError", (Exception,), {})("at 3:4")


def crashes(stage):
    yield Measure("before the crash")
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(stage):
    subprocess.Popen([sys.executable, "-c", CHILD, os.environ["FIFO"]])
    yield Measure("before the hang")
    time.sleep(9)


def ends(stage):
    yield Measure(f"on {stage}")


STEPS = {step.__name__: step for step in (raises, crashes, hangs, ends)}
"""


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


@pytest.fixture
def play(tmp_path: Path) -> Any:
    """`gpu_all.played` of a copy of the script, with these steps."""
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "gpu_steps.py").write_text(STEPS)
    return runpy.run_path(str(tmp_path / SCRIPT.name))["played"]


def test_a_step_that_raises_or_crashes_keeps_its_figures(play: Any) -> None:
    found = list(play(["raises", "crashes", "ends"], time.monotonic() + 60))
    outcomes = [(record["step"], record["measures"][0]["name"], record.get("error")) for record in found]
    assert outcomes == [
        ("raises", "before the error", "CompilationError: at 3:4"),
        ("crashes", "before the crash", "the process ended with status -9"),
        ("ends", "on cuda", None),
    ]


def test_a_step_that_hangs_is_ended_with_all_its_processes(
    play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    monkeypatch.setenv("FIFO", str(fifo))
    written = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    [record] = play(["hangs"], time.monotonic() + 2)
    assert record["measures"][0]["name"] == "before the hang"
    assert record["error"] == "not finished after 2 s"
    os.set_blocking(written, True)
    with os.fdopen(written) as file:
        assert file.read() == ""  # returns when no process has it open for writing


def test_steps_share_the_time_that_is_left(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []

    def in_process(name: str, *, within: float) -> dict[str, Any]:
        shares.append(within)
        return {}

    monkeypatch.setitem(play.__globals__, "in_process", in_process)
    deadline = time.monotonic() + 3000
    list(play(["first", "second", "third"], deadline))
    assert [round(share, -1) for share in shares] == [1000, 1500, 3000]


def test_subnormal_codes_are_tested_first_on_a_gpu() -> None:
    first, *others = runpy.run_path(str(SCRIPT))["tests_on_a_device"]()
    found = re.search(r"^def (test_\w+)", first.read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == "test_subnormal_fp8_codes_are_read_exactly"
    assert {"test_triton_sweeps.py", "test_symmetric_product.py"} <= {path.name for path in others}


@pytest.mark.parametrize(("first", "later", "num_runs"), [(9.0, 0.01, 30), (0.01, 0.2, 4), (9.0, 2.0, 2)])
def test_a_slow_case_is_repeated_less(first: float, later: float, num_runs: int) -> None:
    """The first run may compile, so it does not count."""
    steps = runpy.run_path(str(SCRIPT.with_name("gpu_steps.py")))
    now = 0.0
    repetitions = steps["repetitions"]
    repetitions.__globals__["time"] = SimpleNamespace(monotonic=lambda: now)
    found = 0
    for number in repetitions(steps["stage_on"]("cpu"), 30):
        now += later if number else first
        found += 1
    assert found == num_runs
