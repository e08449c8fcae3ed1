"""Small runs whose checkpoints are kept in this folder, to be resumed by later versions. Run once per recorded commit.

    PYTHONPATH=integration_tests/support:integration_tests/testing:packages/opt-checkpoint/tests \
        python packages/opt-checkpoint/tests/golden/make_recorded.py recorded-COMMIT

The manifest of each has the losses of the steps that followed.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from processes import run_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from opt_checkpoint import load, load_optimizer, save, sharded_model, sharded_optimizer
from opt_stack import DistributedDataParallel, DistributedDataParallelConfig, OptimizerConfig, get_optimizer

HERE = Path(__file__).parent
STEPS = 2  # before the checkpoint, and after it


class Only(nn.Module):
    """A model with one child, of any name."""

    def __init__(self, name: str, child: nn.Module) -> None:
        super().__init__()
        self.add_module(name, child)
        self.only = name

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._modules[self.only](batch)  # type: ignore[misc]
        return result


def net() -> nn.Module:
    """Two matrices, whose values a load replaces."""
    return nn.Sequential(nn.Linear(3, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))


def one_module() -> nn.Module:
    """A matrix under the name that wrappers use."""
    return Only("module", nn.Linear(3, 2, bias=False))


def one_orig_mod() -> nn.Module:
    """A matrix under the name that `torch.compile` uses, in a model that is not compiled."""
    return nn.Sequential(Only("_orig_mod", nn.Linear(3, 2, bias=False)))


def compiled(model: nn.Module) -> nn.Module:
    """A compiled model."""
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def wrapped(model: nn.Module) -> nn.Module:
    """Our wrapper, ZeRO-1."""
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    return DistributedDataParallel(config, model)


class Run:
    """A model and its optimizer.

    Args:
        model: in its wrappers.
        config: of our optimizer; None for torch's SGD.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig | None = None) -> None:
        self.model = model
        self.config = config
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))
        sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        self.optimizer: Any = sgd(model.parameters()) if config is None else get_optimizer(config, [model])

    def train(self, start: int) -> list[float]:
        """The losses of some steps, on the same data on every rank."""
        losses = []
        for step in range(start, start + STEPS):
            batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            with torch.compiler.set_stance("force_eager"):  # only the names of compiled models count
                loss = (self.model(batch) - 1).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        """What is saved."""
        model = sharded_model(self.model)
        if self.config is None:
            return {"model": model, "optimizer": sharded_optimizer(self.model, self.optimizer)}
        return {"model": model, "optimizer": self.optimizer.sharded_state_dict(model)}

    def resume(self, path: Path) -> None:
        """Load what `state` saved, however its names were made."""
        if self.config is None:
            assert load({"model": sharded_model(self.model)}, path).missing == ()
            report = load_optimizer(self.model, self.optimizer, path)
            assert report.uninitialised == report.gone == report.groups.new == report.groups.gone == ()
            return
        report = load(self.state(), path)
        assert report.missing == report.unexpected == ()
        self.optimizer.load_state_dict(report.state["optimizer"])


def adam() -> OptimizerConfig:
    """The configuration of our optimizer."""
    return OptimizerConfig(lr=0.1, weight_decay=0.1, clip_grad=0.0, use_distributed_optimizer=True)


def muon() -> OptimizerConfig:
    """Whole matrices are dealt to ranks."""
    return OptimizerConfig(lr=0.1, optimizer="muon", clip_grad=0.0, use_layer_wise_distributed_optimizer=True)


RUNS: dict[str, tuple[int, Callable[[], Run]]] = {  # ranks, and the run
    "plain": (1, lambda: Run(net())),
    "ddp": (2, lambda: Run(TorchDDP(net()))),
    "compiled": (1, lambda: Run(compiled(net()))),
    "compiled-ddp": (2, lambda: Run(compiled(TorchDDP(net())))),
    "only-module": (1, lambda: Run(one_module())),
    "only-module-ddp": (2, lambda: Run(TorchDDP(one_module()))),
    "only-orig-mod": (1, lambda: Run(one_orig_mod())),
    "zero1": (2, lambda: Run(net(), adam())),
    "zero1-wrapped": (2, lambda: Run(wrapped(net()), adam())),
    "zero1-only-module": (2, lambda: Run(wrapped(one_module()), adam())),
    "layer-wise": (2, lambda: Run(net(), muon())),
}


def record(kind: str, path: str) -> None:
    """Train, and save what a second run has half-way."""
    make = RUNS[kind][1]
    whole = make()
    half = make()
    whole.train(0)
    losses = whole.train(STEPS)
    half.train(0)
    save(half.state(), path, details={"losses": losses})


def main() -> None:
    """Write all of them."""
    folder = HERE / sys.argv[1]
    folder.mkdir()
    for kind, (ranks, _) in RUNS.items():
        run_processes(ranks, record, kind, str(folder / kind))


if __name__ == "__main__":
    main()
