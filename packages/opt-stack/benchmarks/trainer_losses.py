"""Compares the losses of our AdamW with those of torch's inside trainers: the largest relative difference of a run.

    python packages/opt-stack/benchmarks/trainer_losses.py --json FILE

Each trainer trains the same small network on the same batches, once with `torch.optim.AdamW` and once with the
optimizers of this repository. Trainers that are not installed are left out; `nox -s trainers` has them.
"""

import argparse
import json
import platform
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opt_config import OptimizerConfig
from opt_kernels import AdamW
from opt_stack import get_optimizer

STEPS = 60
BATCH = 16
LR = 1e-2
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """A regression whose forward returns the loss, as the HF Trainer needs it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x) - labels).square().mean()}


def examples() -> list[dict[str, Tensor]]:
    """The data set: one example for each row of each batch."""
    x = torch.randn(STEPS * BATCH, 8, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.square().sum(0, keepdim=True)} for row in x]


def loader() -> Any:
    return torch.utils.data.DataLoader(examples(), batch_size=BATCH)  # type: ignore[arg-type]


def torchs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def drop_in(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW(model.parameters(), lr=LR)


def stack(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of `get_optimizer`, with decay on all parameters, as torch's."""
    return get_optimizer(OptimizerConfig(lr=LR, weight_decay=0.01, clip_grad=0.0), [model], {})


def in_accelerate(make: Make) -> list[float]:
    accelerator = import_module("accelerate").Accelerator(cpu=True)
    net = Net()
    model, optimizer, data = accelerator.prepare(net, make(net), loader())
    losses = []
    for batch in data:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_lightning(make: Make) -> list[float]:
    lightning = import_module("lightning")
    losses: list[float] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        """`Net` as Lightning trains it."""

        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss = self.net(**batch)["loss"]
            losses.append(loss.item())
            return loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make(self.net)

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet).fit(Module(), loader())
    return losses


def in_the_hf_trainer(make: Make) -> list[float]:
    transformers = import_module("transformers")
    net = Net()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=BATCH, num_train_epochs=1, logging_steps=1, use_cpu=True,
            report_to="none", save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer = transformers.Trainer(net, arguments, train_dataset=examples(), optimizers=(make(net), None))
        losses: list[float] = []
        compute = trainer.compute_loss

        def recorded(*args: Any, **options: Any) -> Any:
            loss = compute(*args, **options)
            losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

        trainer.compute_loss = recorded
        trainer.train()
    return losses


TRAINERS = {"accelerate": in_accelerate, "lightning": in_lightning, "transformers": in_the_hf_trainer}


def processor() -> str:
    """The name of the processor, or its architecture where the system does not tell it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = {}
    versions = {"torch": str(torch.__version__)}
    for name, train in TRAINERS.items():
        if find_spec(name) is None:
            print(f"{name} is not installed")
            continue
        versions[name] = version(name)
        expected = train(torchs)
        assert len(expected) == STEPS
        for ours in (drop_in, stack):
            pairs = zip(train(ours), expected, strict=True)
            key = f"{name}, {'opt_kernels.AdamW' if ours is drop_in else 'get_optimizer'}"
            figures[key] = max(abs(got / wanted - 1) for got, wanted in pairs)
            print(f"{key} {figures[key]:.2g}, loss {expected[0]:.3g} to {expected[-1]:.3g}")
    machine = {"processor": processor(), "python": platform.python_version(), **versions}
    result = {"date": datetime.now(UTC).date().isoformat(), "machine": machine, "figures": figures}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
