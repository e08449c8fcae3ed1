"""The HF Trainer takes the adapter with the optimizer, steps it once per update, saves and resumes it."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from opt_scheduler import as_lr_scheduler, linear, warmup


class Toy(torch.nn.Module):
    """A linear layer that returns its loss the way the Trainer expects it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Twenty fixed rows."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), float(index))}


class Recording(Trainer):
    """A Trainer that records the learning rate and weight decay of every update."""

    used: list[tuple[float, float]]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        group = self.optimizer.param_groups[0]
        self.used.append((group["lr"], group["weight_decay"]))
        return super().training_step(*args, **kwargs)  # type: ignore[no-any-return]


def train(folder: Path, *, resume: Path | None = None) -> Recording:
    torch.manual_seed(0)
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters())
    lr = warmup(linear(1e-2, 0.0, steps=16), steps=4)
    scheduler: Any = as_lr_scheduler(optimizer, {"lr": lr, "weight_decay": linear(0.0, 0.1, steps=20)})
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        save_strategy="steps",
        save_steps=10,
        disable_tqdm=True,
    )
    trainer = Recording(model=model, args=arguments, train_dataset=Rows(), optimizers=(optimizer, scheduler))
    trainer.used = []
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    trainer.num_steps = scheduler.scheduler.num_steps
    return trainer


def test_a_resumed_run_uses_the_values_of_one_never_stopped(tmp_path: Path) -> None:
    unbroken = train(tmp_path)
    resumed = train(tmp_path / "again", resume=tmp_path / "checkpoint-10")
    assert len(unbroken.used) == 20
    assert resumed.used == unbroken.used[10:]
    assert unbroken.used[4][0] == 1e-2  # one step per update: warmup has ended
    assert resumed.num_steps == unbroken.num_steps == 20
