"""Parameters in another memory format than contiguous are updated as contiguous ones are."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from opt_checkpoint import load, save, sharded_model
from opt_config import OptimizerConfig
from opt_stack import Optimizer, get_optimizer

NUMBERS = {
    "fp32": {},
    "fp32 copies": {"bf16": True},
    "remainders": {"bf16": True, "use_precision_aware_optimizer": True},
    "24 bits": {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.int8},
    "scaled fp16": {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.float16},
    "host": {"bf16": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
}


def built(config: OptimizerConfig, memory_format: torch.memory_format) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(config.precision.params)
    model.to(memory_format=memory_format)
    return model, get_optimizer(config, [model], {})


def step(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param)
    assert optimizer.step().success


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_channels_last_has_the_bits_of_contiguous_parameters(rule: str, numbers: dict[str, object]) -> None:
    """With copies in fp32, the first step raised LayoutError, on a model that the optimizer had been built for."""
    config = OptimizerConfig(lr=1e-2, optimizer=rule, **numbers)  # type: ignore[arg-type]
    last, plain = built(config, torch.channels_last), built(config, torch.contiguous_format)
    for seed in range(3):
        step(*last, seed)
        step(*plain, seed)
    resumed = built(config, torch.channels_last)
    resumed[0].load_state_dict(plain[0].state_dict())
    resumed[1].load_state_dict(plain[1].state_dict())
    for trained in (last, plain, resumed):
        step(*trained, 3)
    for one, other, again in zip(*(model.parameters() for model, _ in (last, plain, resumed)), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(again, other)


NARROW = {
    "int8": {"optimizer": "lion", "optimizer_options": {"exp_avg_dtype": "int8"}},
    "fp8": {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    "scaled fp16": {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": torch.float16,
        "exp_avg_sq_dtype": torch.float16,
    },
}


@pytest.mark.parametrize("narrow", NARROW.values(), ids=NARROW)
def test_codes_of_channels_last_parameters_are_saved_and_loaded(narrow: dict[str, object], tmp_path: Path) -> None:
    """`sharded_state_dict` raised "view size is not compatible", because blocks of codes are runs of memory."""
    config = OptimizerConfig(lr=1e-2, **narrow)  # type: ignore[arg-type]
    model, optimizer = built(config, torch.channels_last)
    step(model, optimizer, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    weights = sharded_model(model)
    save({"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}, tmp_path / "saved")
    step(model, optimizer, 1)
    wanted = [param.detach().clone() for param in model.parameters()]
    for memory_format in (torch.channels_last, torch.contiguous_format):
        other, resumed = built(config, memory_format)
        weights = sharded_model(other)
        state = load(
            {"model": weights, "optimizer": resumed.sharded_state_dict(weights)}, tmp_path / "saved", dtype="cast"
        ).state
        resumed.load_state_dict(state["optimizer"])
        step(other, resumed, 1)
        for param, value in zip(other.parameters(), wanted, strict=True):
            if memory_format is torch.channels_last:
                assert torch.equal(param, value)
            else:  # encoded in other blocks: scales differ by less than a rounding unit of the codes
                torch.testing.assert_close(param, value, rtol=0, atol=2 * config.lr)  # a sign of Lion may turn
    with pytest.raises(ValueError, match="lacks exp_avg_scale"):
        built(config, torch.contiguous_format)[1].load_state_dict(saved)
    plain = built(config, torch.contiguous_format)[1].state_dict()
    with pytest.raises(ValueError, match="has exp_avg_scale"):
        built(config, torch.channels_last)[1].load_state_dict(plain)
    other, resumed = built(config, torch.channels_last)
    step(other, resumed, 0)
    resumed.load_state_dict(saved)
    step(other, resumed, 1)
    assert all(map(torch.equal, other.parameters(), wanted))
