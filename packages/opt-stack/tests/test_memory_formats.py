"""Parameters in another memory format than contiguous are updated as contiguous ones are."""

import pytest
import torch
from torch import nn

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
