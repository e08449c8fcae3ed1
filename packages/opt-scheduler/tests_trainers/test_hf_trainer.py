"""The HF Trainer takes the adapter with the optimizer, steps it once per update, saves and resumes it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from opt_scheduler import OptimizerParamScheduler, as_lr_scheduler, linear, warmup


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


def adapter(optimizer: torch.optim.Optimizer, *, one_call: bool) -> Any:
    if one_call:
        lr = warmup(linear(1e-2, 0.0, steps=16), steps=4)
        return as_lr_scheduler(optimizer, {"lr": lr, "weight_decay": linear(0.0, 0.1, steps=20)})
    return as_lr_scheduler(
        OptimizerParamScheduler(
            optimizer, init_lr=0.0, max_lr=1e-2, min_lr=0.0, lr_warmup_steps=4, lr_decay_steps=20,
            lr_decay_style="linear", start_wd=0.0, end_wd=0.1, wd_incr_steps=20, wd_incr_style="linear",
        )
    )  # fmt: skip


def train(folder: Path, *, resume: Path | None = None, one_call: bool = False) -> Recording:
    torch.manual_seed(0)
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = adapter(optimizer, one_call=one_call)
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=2, use_cpu=True, report_to=[],
        save_strategy="steps", save_steps=10, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = Recording(model=model, args=arguments, train_dataset=Rows(), optimizers=(optimizer, scheduler))
    trainer.used = []
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    trainer.num_steps = scheduler.scheduler.num_steps
    return trainer


@pytest.mark.parametrize("one_call", [False, True], ids=["megatron", "one-call"])
def test_a_resumed_run_uses_the_values_of_one_never_stopped(tmp_path: Path, one_call: bool) -> None:
    unbroken = train(tmp_path, one_call=one_call)
    resumed = train(tmp_path / "again", resume=tmp_path / "checkpoint-10", one_call=one_call)
    assert len(unbroken.used) == 20
    assert resumed.used == unbroken.used[10:]
    assert unbroken.used[4][0] == 1e-2  # one step per update: warmup has ended
    assert resumed.num_steps == unbroken.num_steps == 20


def test_the_learning_rate_it_logs_is_the_one_used(tmp_path: Path) -> None:
    trainer = train(tmp_path)
    logged = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    # The Trainer decides which of two neighbouring updates a log line belongs to.
    after = [lr for lr, _ in trainer.used[1:]]
    assert logged[: len(after)] == after or logged == [lr for lr, _ in trainer.used]
