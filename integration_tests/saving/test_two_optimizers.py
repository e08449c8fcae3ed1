"""Two models and two optimizers of opt-stack in one checkpoint, as a GAN has them."""

from pathlib import Path

import pytest
import torch

from opt_checkpoint import load, save, sharded_model
from opt_config import OptimizerConfig
from opt_stack import get_optimizer


@pytest.mark.filterwarnings("ignore")
def test_two_optimizers_of_one_state_keep_their_own_moments(tmp_path: Path) -> None:
    torch.manual_seed(1)
    models = {name: torch.nn.Linear(3, 2) for name in ("generator", "discriminator")}
    config = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.0)
    optimizers = {name: get_optimizer(config, model) for name, model in models.items()}
    for steps, (name, model) in enumerate(models.items(), start=1):
        for _ in range(steps):
            optimizers[name].zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            optimizers[name].step()

    def state() -> dict[str, object]:
        parts = {name: sharded_model(model) for name, model in models.items()}
        moved = {f"{name}_optimizer": optimizers[name].sharded_state_dict(part) for name, part in parts.items()}
        return {**parts, **moved}

    before = {name: model.weight.detach().clone() for name, model in models.items()}
    save(state(), tmp_path / "x")
    for name, model in models.items():
        torch.nn.init.zeros_(model.weight)
        model(torch.randn(4, 3)).square().sum().backward()
        optimizers[name].step()
    report = load(state(), tmp_path / "x")
    assert report.missing == report.unexpected == ()
    for steps, name in enumerate(models, start=1):
        optimizers[name].load_state_dict(report.state[f"{name}_optimizer"])
        assert torch.equal(models[name].weight, before[name])
        loaded = report.state[f"{name}_optimizer"]["state"]
        assert {int(own["step"]) for own in loaded.values()} == {steps}
