"""python -m opt_stack: plans and groups without a process group, a GPU or, for plans, a model."""

import json
import sys
from pathlib import Path
from runpy import run_module
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


REMAINDERS = {"bf16": True, "use_precision_aware_optimizer": True, "store_param_remainders": True}
SOAP = 4 * (6 + 2 / 1024)  # six matrices of the parameter's size, and two vectors of 1024 eigenvalues


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"fp16": True}, {"fp32": 8, "fp16": 12}),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, {"fp32": 0}),
        (REMAINDERS, {"fp32": 8, "bf16": 10}),
        ({"optimizer": "soap"}, {"fp32": float(f"{SOAP:g}")}),
    ],
    ids=str,
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
    assert vectors.split()[:6] == ["bias", "or", "vector", "adam", "2", "10"]


REFUSED: list[tuple[dict[str, Any], list[str], str]] = [
    ({"lr": -1.0}, [], "lr=-1.0: must be at least 0 and finite"),
    ({"learning_rate": 1.0}, [], "learning_rate=1.0: unknown field; set lr."),
    ({"optimizer": "adma"}, [], "optimizer='adma' is unknown"),
    ({"optimizer": "muon", "use_distributed_optimizer": True}, [], "optimizer='muon' needs whole matrices, but use_d"),
    ({"bf16": True}, MODEL, "bf16=True: has no effect"),
    ({}, ["--model", "stack_models:nothing"], "has no attribute 'nothing'"),
    ({}, [*MODEL, "--rank", "1"], "--rank 1: a world of 1 has ranks 0 to 0"),
    ({"bf16": True}, ["--section", "train"], "train"),
]


@pytest.mark.parametrize(("fields", "arguments", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused_says_why_and_exits_with_2(
    config: Any, capsys: Any, monkeypatch: Any, fields: dict[str, Any], arguments: list[str], message: str
) -> None:
    """Run as a module."""
    monkeypatch.setattr(sys, "argv", ["opt_stack", "plan", config(**fields), *arguments])
    with pytest.raises(SystemExit, match=r"\A2\Z"):
        run_module("opt_stack", run_name="__main__")
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_a_world_of_no_ranks_is_no_world(config: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["plan", config(), "--world", "0"])
    assert "'0' is not a number of ranks; pass 1 or more" in capsys.readouterr().err
