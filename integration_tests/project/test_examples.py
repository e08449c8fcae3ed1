"""Every example runs for a few steps, as its docstring says it is run."""

import json
import math
import re
from pathlib import Path

import pytest
from processes import RankError, run_program

pytestmark = pytest.mark.nightly
EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(name: str, *options: object, ranks: int = 2) -> str:
    """What the example prints."""
    return run_program(EXAMPLES / name, *options, ranks=ranks)


def test_every_example_is_run_by_some_test() -> None:
    ran_here = set(re.findall(r'torchrun\("(\w+\.py)"', Path(__file__).read_text()))
    # Imported by the others; tested in test_quickstart.py and test_leaderboard.py.
    imported = {"char_gpt.py", "progress.py", "leaderboard_table.py"}
    tested = {"quickstart.py", "leaderboard.py", "which_numbers.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == ran_here | imported | tested


def test_muon_trains_and_its_plan_leaves_embeddings_and_head_to_adam() -> None:
    printed = torchrun("train_muon.py", "--steps", 10, "--batch", 2)
    assert "muon updates 16 parameters" in printed  # four matrices in each of four blocks
    assert "adam updates 37 parameters" in printed
    (bits,) = re.findall(r"step 10: ([\d.]+) bits per character", printed)
    assert 0 < float(bits) < math.log2(128) + 1


def test_the_mixture_of_experts_trains() -> None:
    (loss,) = re.findall(r"step 10: loss ([\d.]+)", torchrun("train_moe.py", "--steps", 10))
    assert math.isfinite(float(loss))


def test_the_gpt_trains_resumes_and_refuses_a_batch_that_ranks_cannot_share(tmp_path: Path) -> None:
    printed = torchrun("train_gpt.py", "--dir", tmp_path, "--steps", 4, "--batch", 2)
    assert "adam updates 29 parameters" in printed
    assert "step 4/4  loss" in printed
    assert "\r" not in printed  # a pipe is not a terminal
    torchrun("train_gpt.py", "--dir", tmp_path, "--steps", 5, "--batch", 2, "--resume", "--name", "resumed", ranks=1)
    assert [row["step"] for row in json.loads((tmp_path / "resumed.json").read_text())["log"]] == [4]
    with pytest.raises(RankError, match="--batch 3 is not a multiple of the 2 ranks"):
        torchrun("train_gpt.py", "--dir", tmp_path / "other", "--batch", 3)


def test_a_tensor_parallel_run_resumes_on_other_sizes_with_the_same_loss(tmp_path: Path) -> None:
    def loss(tp: int, steps: int, folder: str) -> float:
        options = ("--tp", tp, "--steps", steps, "--dir", tmp_path / folder)
        printed = torchrun("train_tensor_parallel.py", *options, ranks=4)
        (found,) = re.findall(rf"TP {tp} x DP {4 // tp}: steps \d+ to {steps}, loss ([\d.]+)", printed)
        return float(found)

    before, after = loss(2, 6, "resumed"), loss(1, 12, "resumed")
    assert after < before
    assert after == pytest.approx(loss(2, 12, "uninterrupted"), rel=1e-4)
