"""Accelerate: a prepared façade accumulates, clips by itself, is saved with the state, and resumes from it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from opt_config import OptimizerConfig
from opt_stack import get_optimizer
from opt_stack.adapters import DeferredOptimizer

accelerate = pytest.importorskip("accelerate")  # an optional session installs the trainers


class Run:
    """A toy model, its optimizer and torch's own schedule, all prepared."""

    def __init__(self, *, accumulate: int = 1, is_deferred: bool = False) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
        config = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5)
        self.facade = DeferredOptimizer(config, model) if is_deferred else get_optimizer(config, [model])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.facade, 12)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, self.facade, schedule)

    def train(self, batches: range) -> list[float]:
        """The learning rates used."""
        used = []
        for batch in batches:
            with self.accelerator.accumulate(self.model):
                used.append(self.optimizer.param_groups[0]["lr"])
                x = torch.randn(3, 4, generator=torch.Generator().manual_seed(batch))
                self.accelerator.backward(self.model(x).square().mean())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        return used

    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}


@pytest.mark.parametrize("saved_at", [0, 3])
@pytest.mark.parametrize("is_deferred", [False, True], ids=["get_optimizer", "DeferredOptimizer"])
def test_a_resumed_run_is_the_run_never_stopped(tmp_path: Path, is_deferred: bool, saved_at: int) -> None:
    unbroken = Run()
    start = unbroken.weights()
    used = unbroken.train(range(8))
    first = Run(is_deferred=is_deferred)
    before = first.train(range(saved_at))
    first.accelerator.save_state(str(tmp_path))
    resumed = Run(is_deferred=is_deferred)
    if saved_at == 0:
        resumed.train(range(8, 10))  # what a load has to undo
    resumed.accelerator.load_state(str(tmp_path))
    assert before + resumed.train(range(saved_at, 8)) == used
    for name, weight in unbroken.weights().items():
        assert torch.equal(resumed.weights()[name], weight), name
        assert (weight != start[name]).any(), name


def test_accumulated_batches_make_one_step() -> None:
    run = Run(accumulate=4)
    run.train(range(12))
    steps = {float(state["step"]) for state in run.facade.state_dict()["state"].values()}
    assert steps == {3.0}
