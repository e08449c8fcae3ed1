"""python -m opt_stack: plans and groups without a process group, a GPU or, for plans, a model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stack_models import make_model

from opt_config import OptimizerConfig
from opt_stack import get_optimizer
from opt_stack.__main__ import main

MODEL = ["--model", "stack_models:make_model"]


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(**fields: Any) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"lr": 1e-2, **fields}))
        return str(path)

    return write


def test_without_a_model_it_lists_each_kind_of_parameter(config: Any, capsys: Any) -> None:
    assert main(["plan", config(bf16=True, optimizer="muon", weight_decay=0.1)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines[1:7]] == [
        ["embedding", "fp32", "adam", "0.01", "0.1"],
        ["matrix", "fp32", "muon", "0.01", "0.1"],
        ["vector", "fp32", "adam", "0.01", "0"],
        ["embedding", "bf16", "adam", "0.01", "0.1"],
        ["matrix", "bf16", "muon", "0.01", "0.1"],
        ["vector", "bf16", "adam", "0.01", "0"],
    ]
    assert lines[-2:] == ["state: whole on every data-parallel rank", "gradients: fp32; clip: 1.0; NoScale()"]


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        pytest.param({}, {"fp32": 8}, id="adam-fp32"),
        pytest.param({"bf16": True}, {"fp32": 8, "bf16": 12}, id="adam-bf16"),
        pytest.param({"fp16": True}, {"fp32": 8, "fp16": 12}, id="adam-fp16"),
        pytest.param({"optimizer": "sgd"}, {"fp32": 4}, id="sgd"),
        pytest.param({"optimizer": "sgd", "sgd_momentum": 0.0}, {"fp32": 0}, id="sgd-plain"),
        pytest.param(
            {"bf16": True, "use_precision_aware_optimizer": True, "store_param_remainders": True},
            {"fp32": 8, "bf16": 10},
            id="remainders",
        ),
        # Six matrices of the parameter's size, and two vectors of 1024 eigenvalues.
        pytest.param({"optimizer": "soap"}, {"fp32": float(f"{4 * (6 + 2 / 1024):g}")}, id="soap"),
    ],
)
def test_bytes_of_state_for_each_element_of_a_matrix(
    config: Any, capsys: Any, fields: dict[str, Any], want: dict[str, float]
) -> None:
    assert main(["plan", config(**fields)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("matrix")]
    assert {row[1]: float(row[-1]) for row in rows} == want


def test_with_a_model_it_prints_the_plan_that_would_be_built(config: Any, capsys: Any) -> None:
    assert main(["plan", config(), *MODEL]) == 0
    assert capsys.readouterr().out.rstrip("\n") == str(get_optimizer(OptimizerConfig(lr=1e-2), [make_model()]).plan)


def test_a_world_shares_the_state_and_a_rank_reports_its_part(config: Any, capsys: Any) -> None:
    numel = sum(param.numel() for param in make_model().parameters())
    reported = []
    for rank in range(4):
        assert main(["plan", config(use_distributed_optimizer=True), *MODEL, "--world", "4", "--rank", str(rank)]) == 0
        lines = capsys.readouterr().out.splitlines()
        (of_rank,) = [line for line in lines if line.startswith(f"rank {rank}: ")]
        reported.append(int(of_rank.split()[2].replace(",", "")))
    assert sum(reported) == 8 * numel


def test_groups_are_a_table(config: Any, capsys: Any) -> None:
    assert main(["groups", config(), *MODEL]) == 0
    heading, default, vectors = capsys.readouterr().out.splitlines()
    assert heading.split()[:4] == ["name", "optimizer", "params", "numel"]
    assert default.split()[:4] == ["default", "adam", "2", "56"]
    assert vectors.split()[:6] == ["*.bias", "or", "1-D", "adam", "2", "10"]


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        pytest.param({"lr": -1.0}, [], "lr=-1.0: must be at least 0 and finite", id="config"),
        pytest.param({"learning_rate": 1.0}, [], "learning_rate=1.0: unknown field; set lr.", id="field"),
        pytest.param({"optimizer": "adma"}, [], "optimizer='adma' is unknown", id="optimizer"),
        pytest.param(
            {"optimizer": "muon", "use_distributed_optimizer": True},
            [],
            "optimizer='muon' needs whole matrices, but use_distributed_optimizer=True",
            id="combination",
        ),
        pytest.param({"bf16": True}, MODEL, "bf16=True: has no effect", id="without effect"),
        pytest.param({}, ["--model", "stack_models:nothing"], "has no attribute 'nothing'", id="factory"),
        pytest.param({}, [*MODEL, "--rank", "1"], "--rank 1: a world of 1 has ranks 0 to 0", id="rank"),
        pytest.param({"bf16": True}, ["--section", "train"], "train", id="section"),
    ],
)
def test_what_is_refused_says_why_and_exits_with_2(
    config: Any, capsys: Any, fields: dict[str, Any], arguments: list[str], message: str
) -> None:
    assert main(["plan", config(**fields), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_a_world_of_no_ranks_is_no_world(config: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["plan", config(), "--world", "0"])
    assert "'0' is not a number of ranks; pass 1 or more" in capsys.readouterr().err


def test_it_runs_as_a_module(config: Any, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "opt_stack", "plan", config(optimizer="adma")], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("optimizer='adma' is unknown")
