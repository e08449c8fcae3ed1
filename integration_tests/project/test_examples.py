"""Every example runs for a few steps, as its docstring says it is run."""

import importlib.util
import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from leaderboard_table import differ
from processes import RankError, run_program

nightly = pytest.mark.nightly
EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(name: str, *options: object, ranks: int = 2) -> str:
    """What the example prints."""
    return run_program(EXAMPLES / name, *options, ranks=ranks)


def test_every_example_is_run_by_some_test() -> None:
    ran_here = set(re.findall(r'torchrun\("(\w+\.py)"', Path(__file__).read_text()))
    # Imported by the others; tested below and in test_quickstart.py.
    imported = {"char_gpt.py", "progress.py", "ranks.py", "leaderboard_table.py"}
    tested = {"quickstart.py", "leaderboard.py", "which_numbers.py", "train_with_restarts.py"}
    tested |= {"train_on_ray.py"}  # by `nox -s engines`
    assert {path.name for path in EXAMPLES.glob("*.py")} == ran_here | imported | tested


PLAIN = {
    "train_gpt.py": (["--steps", 4, "--batch", 2], r"step 4/4  loss [\d.]+"),
    "train_muon.py": (["--steps", 1, "--batch", 2], "muon updates 16 parameters"),
    "train_moe.py": (["--steps", 10], r"step 10: loss [\d.]+"),
    "train_tensor_parallel.py": (["--steps", 2], r"TP 1 x DP 1: steps 0 to 2, loss [\d.]+"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_an_example_runs_with_plain_python_and_writes_under_runs(name: str, tmp_path: Path) -> None:
    """It ended in torch's "environment variable RANK expected, but not set"; one left a folder beside the sources."""
    options, printed = PLAIN[name]
    assert re.search(printed, run_program(EXAMPLES / name, *options, ranks=0, folder=tmp_path))
    assert {path.name for path in tmp_path.iterdir()} <= {"runs"}


@nightly
def test_muon_trains_and_leaves_embeddings_and_head_to_adam() -> None:
    printed = torchrun("train_muon.py", "--steps", 10, "--batch", 2)
    assert "muon updates 16 parameters" in printed  # four matrices in each of four blocks
    assert "adam updates 37 parameters" in printed
    (bits,) = re.findall(r"step 10: ([\d.]+) bits per character", printed)
    assert 0 < float(bits) < math.log2(128) + 1


@nightly
def test_the_mixture_of_experts_trains() -> None:
    (loss,) = re.findall(r"step 10: loss ([\d.]+)", torchrun("train_moe.py", "--steps", 10))
    assert math.isfinite(float(loss))


@nightly
def test_gpt_trains_resumes_and_refuses_an_indivisible_batch(tmp_path: Path) -> None:
    printed = torchrun("train_gpt.py", "--dir", tmp_path, "--steps", 4, "--batch", 2)
    assert "adam updates 29 parameters" in printed
    assert "step 4/4  loss" in printed
    assert "\r" not in printed  # a pipe is not a terminal
    torchrun("train_gpt.py", "--dir", tmp_path, "--steps", 5, "--batch", 2, "--resume", "--name", "resumed", ranks=1)
    assert [row["step"] for row in json.loads((tmp_path / "resumed.json").read_text())["log"]] == [4]
    with pytest.raises(RankError, match="--batch 3 is not a multiple of the 2 ranks"):
        torchrun("train_gpt.py", "--dir", tmp_path / "other", "--batch", 3)


@nightly
def test_tensor_parallel_runs_resume_on_other_sizes(tmp_path: Path) -> None:
    def loss(tp: int, steps: int, folder: str) -> float:
        options = ("--tp", tp, "--steps", steps, "--dir", tmp_path / folder)
        printed = torchrun("train_tensor_parallel.py", *options, ranks=4)
        (found,) = re.findall(rf"TP {tp} x DP {4 // tp}: steps \d+ to {steps}, loss ([\d.]+)", printed)
        return float(found)

    before = loss(2, 6, "resumed")
    after = loss(1, 12, "resumed")
    assert after < before
    assert after == pytest.approx(loss(2, 12, "uninterrupted"), rel=1e-4)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@nightly
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_run_restarted_by_torchrun_ends_like_the_whole_one(tmp_path: Path, num_nodes: int) -> None:
    """A worker is killed with SIGKILL. With gloo, the second attempt found the addresses of the first one's ranks; the
    agents of several nodes count attempts apart."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": f"{num_nodes - 1}"}
    printed = {}
    for name, restarts, options in (("killed", "2", ["--kill"]), ("whole", "0", [])):
        place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", name]
        launch = ["--nnodes", str(num_nodes), "--nproc-per-node", str(2 // num_nodes), *place]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, "--max-restarts", restarts]
        command += [str(EXAMPLES / "train_with_restarts.py"), "--dir", str(tmp_path / name), *options]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        agents = [subprocess.Popen(command, env=environment, **pipes) for _ in range(num_nodes)]
        outputs = [agent.communicate(timeout=600)[0] for agent in agents]
        assert not any(agent.returncode for agent in agents), outputs[0][-3000:]
        printed[name] = "".join(outputs)
    begun = re.findall(r"rank \d begins after step (\d)", printed["killed"])
    assert sorted(begun)[:2] == ["0", "0"]
    assert sorted(begun)[2:] in (["3", "3"], ["6", "6"])  # the newest checkpoint that was complete
    ends = [str(tmp_path / name / "step-000000012") for name in printed]
    compared = subprocess.run([sys.executable, "-m", "opt_checkpoint", "diff", *ends], check=False)
    assert compared.returncode == 0


# --- the leaderboard and "which numbers should I use" -----------------------------------------------------------------


def loaded(name: str, monkeypatch: pytest.MonkeyPatch, *, dim: int) -> Any:
    """A fresh copy of the example, on a model and a budget of a second."""
    spec: Any = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    module.STEPS = 4
    module.WARMUP = 2
    module.EVAL_EVERY = 2
    module.BATCH = 2
    module.MODEL = {"dim": dim, "depth": 1, "num_heads": 2}
    return module


@nightly
def test_every_contender_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    board = loaded("leaderboard", monkeypatch, dim=16)
    board.STEPS = 64
    board.WARMUP = 0.1
    for contender in board.CONTENDERS:
        found = board.train(board.Run(contender, (contender.lr, contender.rest_lr), board.STEPS, 0))
        assert found["curve"][-1][0] == board.STEPS, contender.name
        assert all(math.isfinite(bits) for _, bits in found["curve"]), contender.name
        assert board.update_seconds(contender) > 0


def test_rules_that_seeds_cannot_tell_apart_do_not_differ() -> None:
    # Deviations of 0.05, three seeds: t = 0.1 / (0.05 * sqrt(2/3)) = 2.449 < 2.776, and 0.2 gives 4.899.
    assert not differ([1.0, 1.05, 1.1], [1.1, 1.15, 1.2])
    assert differ([1.0, 1.05, 1.1], [1.2, 1.25, 1.3])


@nightly
def test_every_format_trains_and_its_bytes_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    example = loaded("which_numbers", monkeypatch, dim=32)
    example.train_missing(tmp_path)
    example.report(tmp_path, tmp_path)
    rows = {row["mode"]: row for row in json.loads((tmp_path / "numbers.json").read_text())["rows"]}
    assert [*rows] == [*example.MODES]
    assert rows["bf16, 16-bit remainders"]["state_bytes"] == pytest.approx(10, abs=0.1)
    # The linear layers' weights take a byte; embeddings and norms, half of this small model, two.
    assert 1 < rows["fp8 (tensorwise), fp32 mains"]["weight_bytes"] < 2
    assert all(math.isfinite(loss) for row in rows.values() for _, loss in row["curve"])
    assert "| fp32 | 4.00 | 8.00 |" in (tmp_path / "numbers.md").read_text()
