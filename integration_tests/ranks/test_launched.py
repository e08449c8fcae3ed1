"""Scripts that a launcher starts on several ranks and that never touch torch.distributed themselves."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import run_program
from torch import nn

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig
from opt_stack import DistributedDataParallel, get_optimizer

# It makes no process group, and ranks draw different weights and samples.
SCRIPT = """
import os, sys, torch
from opt_stack import OptimizerConfig, get_optimizer
torch.manual_seed(1 + int(os.environ["RANK"]))
config = OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, lr=0.5, weight_decay=0.0, clip_grad=0.0)
model = torch.nn.Linear(3, 1, bias=False)
try:
    refusal = str(get_optimizer(config, [model]))
except ValueError as error:
    refusal = str(error)
optimizer = get_optimizer(config, [model], broadcast_params=True)
start, x = model.weight.detach().clone(), torch.randn(4, 3)
model(x).sum().backward()
norm = optimizer.step().grad_norm
found = {"refusal": refusal, "start": start, "x": x, "norm": norm, "weight": model.weight.detach()}
torch.save(found, f"{sys.argv[1]}/{os.environ['RANK']}.pt")
"""


def test_a_script_under_a_launcher_averages_gradients_over_ranks(tmp_path: Path) -> None:
    """With different seeds it is refused on every rank, and the refusal says what to type."""
    (tmp_path / "script.py").write_text(SCRIPT)
    run_program(tmp_path / "script.py", tmp_path, ranks=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first["start"], second["start"])
    assert not torch.equal(first["x"], second["x"])
    mean = (first["x"].double().sum(0) + second["x"].double().sum(0)) / 2
    for rank in (first, second):
        for words in ("ranks hold different values of 'weight': [1] differ from rank 0", "torch.manual_seed"):
            assert words in rank["refusal"]
        assert "broadcast_params=True" in rank["refusal"]
        torch.testing.assert_close(rank["weight"], (first["start"].double() - 0.5 * mean).float(), rtol=1e-6, atol=1e-6)
        assert rank["norm"] == pytest.approx(mean.norm().item(), rel=1e-6)


def test_a_world_that_is_announced_by_halves_is_refused_with_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    message = (
        r"WORLD_SIZE=2 in the environment, but torch\.distributed is not initialised and these variables are not set: "
        "MASTER_ADDR, MASTER_PORT; start the script with torchrun, .* or unset WORLD_SIZE to train in one process"
    )
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=message):
        get_optimizer(OptimizerConfig(lr=0.1), [model])
    with pytest.raises(ConfigError, match=message):
        DistributedDataParallel(DistributedDataParallelConfig(), model)
    assert not dist.is_initialized()


def test_a_world_size_that_is_not_a_number_of_ranks_is_refused_and_one_trains_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for size in ("two", "0", "-1"):
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(ConfigError, match="WORLD_SIZE"):
            get_optimizer(OptimizerConfig(lr=0.1), [nn.Linear(2, 2)])
    for size in ("1", ""):
        monkeypatch.setenv("WORLD_SIZE", size)
        get_optimizer(OptimizerConfig(lr=0.1), [nn.Linear(2, 2)])
        assert not dist.is_initialized()
