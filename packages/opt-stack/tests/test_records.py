"""What is written down when an optimizer is built: the configuration, the plan, the map of groups."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from stack_models import make_model
from torch.distributed.checkpoint.state_dict_loader import load

from opt_config import OptimizerConfig
from opt_stack import get_optimizer
from opt_stack.records import merged

GROUP_OF = {"0.weight": 0, "0.bias": 1, "2.weight": 0, "2.bias": 1}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_map_is_a_checkpoint_and_a_page(tmp_path: Path) -> None:
    """Chunks have separate names."""
    path = tmp_path / "maps" / "groups"
    get_optimizer(OptimizerConfig(lr=1e-2), [make_model()], dump_param_to_param_group_map=str(path))
    page = read(tmp_path / "maps" / "groups.json")
    assert page["group_of"] == GROUP_OF
    assert [(group["index"], group["name"], group["optimizer"]) for group in page["groups"]] == [
        (0, "default", "adam"),
        (1, "bias or vector", "adam"),
    ]
    stored: dict[str, Any] = dict.fromkeys(GROUP_OF, -1)
    load(stored, checkpoint_id=str(path))
    assert stored == GROUP_OF
    chunks = [make_model(), make_model()]
    get_optimizer(OptimizerConfig(lr=1e-2), chunks, {}, dump_param_to_param_group_map=str(tmp_path / "map"))
    assert list(read(tmp_path / "map.json")["group_of"])[3:5] == ["2.bias", "model1.0.weight"]


def test_maps_of_replicas_stages_and_uneven_ranks_merge_into_one() -> None:
    assert merged([{"a": 0}, {"a": 0}]) == {"a": 0}
    assert merged([{"a": 0}, {"b": 1}, {}]) == {"a": 0, "b": 1}
    assert merged([{"a": 0}, {"a": 1, "b": 1}]) == {"rank 0: a": 0, "rank 1: a": 1, "b": 1}


def test_the_resolved_config_and_plan_are_logged_if_requested(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "run"
    config = OptimizerConfig(lr=1e-2, loss_scale=8.0, config_logger_dir=str(folder))
    optimizer = get_optimizer(config, [make_model()])
    written = read(folder / "optimizer_config.json")
    assert written["config"]["lr"] == 1e-2
    assert written["loss_scaling"] == {"is": "ConstantScale", "scale": 8.0}
    assert (folder / "optimizer_plan.txt").read_text() == f"{optimizer.plan}\n"
    assert optimizer.plan.state_bytes() == optimizer.stepper.units[0].state_bytes()


def test_the_plan_is_logged_but_not_written_unless_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, logger="opt_stack"):
        optimizer = get_optimizer(OptimizerConfig(lr=1e-2), [make_model()])
    assert caplog.messages == [str(optimizer.plan)]
    assert list(tmp_path.iterdir()) == []
