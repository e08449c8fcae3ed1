"""Lightning: automatic optimization steps the façade under torch's schedule, in every precision; alone."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from opt_config import OptimizerConfig
from opt_stack import get_optimizer

lightning = pytest.importorskip("lightning")  # an optional session installs the trainers

STEPS_PER_EPOCH = 10


class Toy(lightning.LightningModule):
    """A small regression."""

    def __init__(self, make: Any = None, *, scales_loss: bool = False) -> None:
        super().__init__()
        self.make = make
        self.scales_loss = scales_loss
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = (self.layers(5 * batch[0].to(self.layers[0].weight.dtype)) - 3).square().mean()
        return self.optimizers().scale_loss(loss) if self.scales_loss else loss  # type: ignore[no-any-return, union-attr]

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.layers)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=2 * STEPS_PER_EPOCH)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(toy: Toy, **options: Any) -> Toy:
    """An epoch of ten batches."""
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet, **options)
    rows = torch.randn(2 * STEPS_PER_EPOCH, 4, generator=torch.Generator().manual_seed(1))
    trainer.fit(toy, DataLoader(TensorDataset(rows), batch_size=2))
    return toy


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def ours(**fields: Any) -> Any:
    """`get_optimizer` with AdamW's numbers, and without the standard overrides, which AdamW does not have."""
    numbers = {"lr": 1e-2, "weight_decay": 0.1, "adam_eps": 1e-8, "adam_beta2": 0.999, "clip_grad": 0.0, **fields}
    return lambda model: get_optimizer(OptimizerConfig(**numbers), [model], {})


def assert_same_weights(one: Toy, other: Toy, **tolerance: float) -> None:
    fresh = Toy().state_dict()
    for name, weight in other.state_dict().items():
        torch.testing.assert_close(one.state_dict()[name], weight, **tolerance, msg=name)
        assert (weight.float() - fresh[name]).abs().max() > 1e-2, name


CLIPPED = {"gradient_clip_val": 0.5}
OPTIONS: dict[str, dict[str, Any]] = {
    "32-true": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed": {"precision": "16-mixed"},  # Lightning scales the loss
    "clipped by norm": CLIPPED,
    "clipped by value": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    "bf16-mixed, clipped": {"precision": "bf16-mixed", **CLIPPED},
    "16-mixed, clipped": {"precision": "16-mixed", **CLIPPED},
    "accumulated, clipped": {"accumulate_grad_batches": 2, **CLIPPED},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_trainers_precision_and_clipping_equal_torchs_adamw(options: dict[str, Any]) -> None:
    # Ten steps of 1e-2, each with a few roundings of 2**-24.
    assert_same_weights(fit(Toy(ours()), **options), fit(Toy(adamw), **options), rtol=0.0, atol=1e-6)


def test_clipping_in_the_step_is_the_trainers_clipping() -> None:
    assert_same_weights(fit(Toy(ours(clip_grad=0.5))), fit(Toy(ours()), **CLIPPED), rtol=0.0, atol=1e-6)


# By the Trainer's precision: the optimizer's configuration, who scales the loss, and the rounding of weights. Updates
# below half a unit in the last place are lost without fp32 main values; torch's AdamW loses them.
TRUE: dict[str, tuple[dict[str, Any], bool, float]] = {
    "bf16-true": ({"bf16": True}, False, 2.0**-7),
    "16-true": ({"fp16": True, "loss_scale": 128.0}, True, 2.0**-8),
}


@pytest.mark.parametrize("precision", TRUE)
def test_parameters_in_16_bits_have_fp32_main_values(precision: str) -> None:
    fields, scales_loss, rounding = TRUE[precision]
    found = fit(Toy(ours(**fields), scales_loss=scales_loss), precision=precision).state_dict()
    for name, weight in fit(Toy(ours())).state_dict().items():
        assert found[name].element_size() == 2
        torch.testing.assert_close(found[name].float(), weight, rtol=2 * rounding, atol=rounding, msg=name)
