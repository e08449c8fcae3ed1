"""Lightning: the adapter and the plain scheduler both train, are saved with a checkpoint, and resume from it."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from opt_scheduler import OptimizerParamScheduler, as_lr_scheduler


class Toy(lightning.LightningModule):
    """A linear layer that records the learning rate and weight decay of every update."""

    def __init__(self, *, adapts: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.adapts = adapts
        self.used: list[tuple[float, float]] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (group,) = self.optimizers().param_groups  # type: ignore[union-attr]
        self.used.append((group["lr"], group["weight_decay"]))
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=0.0,
            lr_warmup_steps=4,
            lr_decay_steps=20,
            lr_decay_style="cosine",
            start_wd=0.0,
            end_wd=0.1,
            wd_incr_steps=20,
            wd_incr_style="linear",
        )
        chosen = as_lr_scheduler(scheduler) if self.adapts else scheduler
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": chosen, "interval": "step"}}


class SteppingItself(Toy):
    """Lightning steps only torch's schedulers on its own; for others it asks for this hook."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


def train(folder: Path, *, adapts: bool, epochs: int, resume: Path | None = None) -> tuple[Toy, Path]:
    lightning.seed_everything(0)
    toy = (Toy if adapts else SteppingItself)(adapts=adapts)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    loader = DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=2)
    trainer.fit(toy, loader, ckpt_path=resume)
    saved = folder / f"{epochs}.ckpt"
    trainer.save_checkpoint(saved)
    return toy, saved


@pytest.mark.parametrize("adapts", [True, False], ids=["adapter", "plain-scheduler"])
def test_a_resumed_run_uses_the_values_of_one_never_stopped(tmp_path: Path, adapts: bool) -> None:
    unbroken, _ = train(tmp_path, adapts=adapts, epochs=2)
    first, saved = train(tmp_path, adapts=adapts, epochs=1)
    second, _ = train(tmp_path, adapts=adapts, epochs=2, resume=saved)
    assert len(unbroken.used) == 20
    assert first.used + second.used == unbroken.used
    assert unbroken.used[4][0] == 1e-2  # one step per update: warmup has ended
    assert unbroken.used[10][1] == pytest.approx(0.05)
