"""The HF Trainer: takes the façade with torch's schedule, saves it with every checkpoint, and resumes from one."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from opt_config import OptimizerConfig
from opt_stack import get_optimizer

transformers = pytest.importorskip("transformers")  # an optional session installs the trainers


class Toy(torch.nn.Module):
    """A small regression that returns its loss the way the Trainer expects it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layers(x).square().mean()}


class Rows(Dataset[dict[str, Tensor]]):
    """Twenty fixed rows."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((4,), float(index) / 20)}


def train(folder: Path, *, resume: Path | None = None) -> Toy:
    model = Toy()
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.0), [model])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        save_strategy="steps",
        save_steps=10,
        disable_tqdm=True,
        logging_steps=10,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows(), optimizers=(optimizer, schedule))
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return model


def test_a_resumed_run_is_the_run_never_stopped(tmp_path: Path) -> None:
    unbroken = train(tmp_path / "one")
    resumed = train(tmp_path / "two", resume=tmp_path / "one" / "checkpoint-10")
    fresh = Toy().state_dict()
    for name, weight in unbroken.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], weight), name
        assert (weight != fresh[name]).any(), name
