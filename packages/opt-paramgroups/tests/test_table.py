"""The group table in its four formats, and the command that prints it."""

import io
import json

import pytest
from models import Experts, Model

from opt_config import OptimizerConfig
from opt_paramgroups import (
    GroupRow,
    as_markdown,
    get_matrix_rule_overrides,
    get_param_groups,
    get_standard_config_overrides,
    group_rows,
)
from opt_paramgroups.__main__ import main

CONFIG = OptimizerConfig(optimizer="muon", lr=1e-3, weight_decay=0.1)


def rows():
    overrides = {**get_standard_config_overrides(CONFIG), **get_matrix_rule_overrides(CONFIG)}
    return group_rows(get_param_groups([Model(width=40), Experts()], CONFIG, overrides))


def test_rows_count_what_the_groups_hold():
    default, experts, vectors, _, rest = rows()
    assert default == GroupRow(
        name="default",
        optimizer="muon",
        num_params=5,
        numel=2 * (120 * 40 + 40 * 40) + 2 * 4,
        dtypes="float32",
        lr=1e-3,
        min_lr=None,
        weight_decay=0.1,
        overrides="",
        first_param="layers.0.attention.linear_qkv.weight",
    )
    assert (experts.name, experts.num_params, experts.numel) == ("default (experts)", 2, 32)
    assert (vectors.optimizer, vectors.weight_decay) == ("adam", 0.0)
    assert rest.first_param == "embedding.weight"
    total = sum(param.numel() for model in (Model(width=40), Experts()) for param in model.parameters())
    assert sum(row.numel for row in rows()) == total


def test_a_group_without_parameters_has_a_row():
    (row,) = group_rows([{**get_param_groups([Experts()], CONFIG, {})[0], "params": [], "param_ids": [], "eps": 1e-6}])
    assert (row.num_params, row.numel, row.dtypes, row.first_param, row.overrides) == (0, 0, "", "", "eps=1e-06")


def test_bars_in_names_do_not_add_columns_to_markdown():
    lines = as_markdown([row._replace(name="a|b") for row in rows()]).splitlines()
    assert lines[1] == "| " + " | ".join(["---"] * 10) + " |"
    assert {line.replace(r"\|", "").count("|") for line in lines} == {11}
    assert any(r"\|" in line for line in lines)


@pytest.mark.needs_extra
def test_rich_shows_names_with_brackets_as_they_are():
    console = pytest.importorskip("rich.console", reason="the rich extra is not installed")
    from opt_paramgroups.table import as_rich

    row = rows()[0]._replace(name="layers.[abc].*")
    page = console.Console(width=200, record=True, file=io.StringIO())
    page.print(as_rich([row]))
    assert "layers.[abc].*" in page.export_text()


@pytest.mark.needs_extra
@pytest.mark.parametrize(
    ("form", "begins"), [("text", "name "), ("markdown", "| name |"), ("json", "[\n"), ("rich", " ")], ids=str
)
def test_the_command_prints_the_table(capsys, monkeypatch, form, begins):
    monkeypatch.setenv("COLUMNS", "200")
    if form == "rich":
        pytest.importorskip("rich", reason="the rich extra is not installed")
    assert main(["table", "models:Model", "--format", form]) == 0
    out = capsys.readouterr().out
    assert out.startswith(begins)
    assert "default" in out


def test_the_command_leaves_a_matrix_rule_its_matrices_only(capsys, tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"optimizer": "soap"}')
    assert main(["table", "models:Model", "--config", str(path), "--format", "json"]) == 0
    counts = {(row["optimizer"], row["num_params"]) for row in json.loads(capsys.readouterr().out)}
    assert counts == {("soap", 4), ("adam", 2), ("adam", 14)}


def test_the_command_refuses_what_is_no_model(capsys):
    for place, message in (
        ("models", "must be module:factory, such as my_project.model:build"),
        ("models:Nothing", "module 'models' has no attribute 'Nothing'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
    ):
        assert main(["table", place]) == 1
        assert capsys.readouterr().err.strip() == f"{place!r}: {message}"
    assert main(["table", "builtins:dict"]) == 0  # an empty model is one: a table without rows


def test_the_command_names_a_bad_configuration_by_its_path(capsys, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[optimizer]\nlr = 0.25\n")
    assert main(["table", "models:Model", "--config", str(path), "--section", "optimizer", "--format", "json"]) == 0
    assert {row["lr"] for row in json.loads(capsys.readouterr().out)} == {0.25}
    path.write_text("lr = -1")
    assert main(["table", "models:Model", "--config", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"{path}: OptimizerConfig: lr=-1: ")
