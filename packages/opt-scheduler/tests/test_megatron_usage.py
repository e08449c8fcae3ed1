"""Code written for Megatron-Core keeps working: a mocked optimizer, positional arguments, its attributes, its state."""

import math
from typing import Any
from unittest.mock import MagicMock

import pytest

from opt_scheduler import OptimizerParamScheduler

ARGUMENTS: dict[str, Any] = {
    "init_lr": 0.01, "max_lr": 0.1, "min_lr": 0.001, "lr_warmup_steps": 100, "lr_decay_steps": 1000,
    "lr_decay_style": "linear", "start_wd": 0.0, "end_wd": 0.1, "wd_incr_steps": 1000, "wd_incr_style": "linear",
}  # fmt: skip
GROUP = {"max_lr": 0.1, "min_lr": 0.001}


@pytest.fixture
def optimizer() -> MagicMock:
    mock = MagicMock()
    mock.param_groups = [{"lr": 0.0, "weight_decay": 0.0}]
    return mock


def test_the_arguments_are_attributes(optimizer: MagicMock) -> None:
    positional: list[Any] = [*ARGUMENTS.values(), True, False, None, None]
    scheduler = OptimizerParamScheduler(optimizer, *positional)
    assert {name: getattr(scheduler, name) for name in ARGUMENTS} == ARGUMENTS
    assert scheduler.optimizer is optimizer
    assert scheduler.num_steps == 0


@pytest.mark.parametrize(
    ("style", "start", "expected"),
    [("constant", 0.1, 0.1), ("linear", 0.0, 0.05), ("cosine", 0.0, 0.05 * (math.cos(math.pi * 0.5) + 1.0))],
)
def test_weight_decay(optimizer: MagicMock, style: str, start: float, expected: float) -> None:
    scheduler = OptimizerParamScheduler(optimizer, **ARGUMENTS | {"wd_incr_style": style, "start_wd": start})
    scheduler.step(500)
    assert scheduler.get_wd() == scheduler.get_wd(GROUP) == expected


@pytest.mark.parametrize(
    ("style", "left"), [("linear", 1 - 400 / 900), ("cosine", (math.cos(math.pi * 4 / 9) + 1) / 2)]
)
def test_learning_rate(optimizer: MagicMock, style: str, left: float) -> None:
    scheduler = OptimizerParamScheduler(optimizer, **ARGUMENTS | {"lr_decay_style": style})
    scheduler.step(50)
    assert scheduler.get_lr(GROUP) == 0.01 + (0.1 - 0.01) * 50 / 100
    scheduler.step(450)
    assert scheduler.get_lr(GROUP) == pytest.approx(0.001 + left * (0.1 - 0.001), rel=1e-15)
    assert optimizer.param_groups[0]["lr"] == scheduler.get_lr(GROUP)


def test_its_state_dict_is_read(optimizer: MagicMock) -> None:
    scheduler = OptimizerParamScheduler(optimizer, **ARGUMENTS)
    scheduler.load_state_dict(
        {name: value for name, value in ARGUMENTS.items() if name != "init_lr"} | {"num_steps": 200}
    )
    assert scheduler.num_steps == 200
    assert {name: scheduler.state_dict()[name] for name in ARGUMENTS} == ARGUMENTS
