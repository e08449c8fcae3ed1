"""Lightning: automatic optimization steps the façade under torch's schedule; a run resumes from its checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from opt_config import OptimizerConfig
from opt_stack import get_optimizer

lightning = pytest.importorskip("lightning")  # an optional session installs the trainers

STEPS_PER_EPOCH = 10


class Toy(lightning.LightningModule):
    """A small regression that records the learning rate of every update."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
        self.used: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        self.used.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return self.layers(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = get_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1), [self.layers])
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=2 * STEPS_PER_EPOCH)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(folder: Path, *, epochs: int, resume: Path | None = None) -> tuple[Toy, Path]:
    toy = Toy()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    rows = torch.randn(2 * STEPS_PER_EPOCH, 4, generator=torch.Generator().manual_seed(1))
    trainer.fit(toy, DataLoader(TensorDataset(rows), batch_size=2), ckpt_path=resume)
    saved = folder / f"{epochs}.ckpt"
    trainer.save_checkpoint(saved)
    return toy, saved


def test_a_resumed_run_is_the_run_never_stopped(tmp_path: Path) -> None:
    unbroken, _ = train(tmp_path, epochs=2)
    first, saved = train(tmp_path, epochs=1)
    second, _ = train(tmp_path, epochs=2, resume=saved)
    assert len(unbroken.used) == 2 * STEPS_PER_EPOCH
    assert first.used + second.used == unbroken.used
    for name, weight in unbroken.state_dict().items():
        assert torch.equal(second.state_dict()[name], weight), name
    fresh = Toy().state_dict()
    assert all((unbroken.state_dict()[name] != weight).any() for name, weight in fresh.items())
