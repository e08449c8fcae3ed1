"""Scripts that a launcher starts on several ranks and that never touch torch.distributed themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_program
from torch import nn

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig
from opt_stack import DistributedDataParallel, get_optimizer

SCRIPT = Path(__file__).parents[1] / "support" / "launched_script.py"


BUILDS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: get_optimizer(OptimizerConfig(lr=0.1), [model]),
    "wrapped": lambda model: DistributedDataParallel(DistributedDataParallelConfig(), model),
}


def test_a_script_under_a_launcher_averages_gradients_over_ranks(tmp_path: Path) -> None:
    """With different seeds it is refused on every rank, and the refusal says what to type."""
    run_program(SCRIPT, tmp_path, ranks=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for rank in (first, second):
        assert "ranks hold different values of 'weight': [1] differ from rank 0" in rank["refusal"]
        assert "torch.manual_seed" in rank["refusal"]
        assert "broadcast_params=True" in rank["refusal"]
    assert torch.equal(first["start"], second["start"])
    assert not torch.equal(first["x"], second["x"])
    mean = (first["x"].double().sum(0) + second["x"].double().sum(0)) / 2
    for rank in (first, second):
        torch.testing.assert_close(rank["weight"], (first["start"].double() - 0.5 * mean).float(), rtol=1e-6, atol=1e-6)
        assert rank["norm"] == pytest.approx(mean.norm().item(), rel=1e-6)


@pytest.mark.parametrize("name", BUILDS)
def test_a_world_that_is_announced_by_halves_is_refused_with_the_variables(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError) as caught:
        BUILDS[name](model)
    assert str(caught.value) == (
        "WORLD_SIZE=2 in the environment, but torch.distributed is not initialised and these variables are not set: "
        "MASTER_ADDR, MASTER_PORT; start the script with torchrun, call torch.distributed.init_process_group first, or "
        "unset WORLD_SIZE to train in one process"
    )
    assert not dist.is_initialized()


@pytest.mark.parametrize("size", ["two", "0", "-1"])
def test_a_world_size_that_is_not_a_number_of_ranks_is_refused(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        get_optimizer(OptimizerConfig(lr=0.1), [nn.Linear(2, 2)])


@pytest.mark.parametrize("size", ["1", ""])
def test_one_launched_rank_trains_alone(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    get_optimizer(OptimizerConfig(lr=0.1), [nn.Linear(2, 2)])
    assert not dist.is_initialized()
