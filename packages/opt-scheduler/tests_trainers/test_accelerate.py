"""Accelerate: a prepared adapter steps once per update and process, skips what the optimizer skips, and resumes."""

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState

from opt_scheduler import as_lr_scheduler, cosine, warmup

LR = warmup(cosine(1e-2, 0.0, steps=16), steps=4)


class Run:
    """A toy model, its optimizer and its scheduler, all prepared."""

    def __init__(self, accumulate: int = 1) -> None:
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        adapter: Any = as_lr_scheduler(optimizer, LR)
        self.scheduler = adapter.scheduler
        self.model, self.optimizer, self.prepared = self.accelerator.prepare(model, optimizer, adapter)

    def train(self, num_batches: int) -> list[float]:
        used = []
        for _ in range(num_batches):
            with self.accelerator.accumulate(self.model):
                used.append(self.optimizer.param_groups[0]["lr"])
                self.accelerator.backward(self.model(torch.ones(2, 4)).square().mean())
                self.optimizer.step()
                self.prepared.step()
                self.optimizer.zero_grad()
        return used


def test_accumulated_batches_do_not_count() -> None:
    assert Run(accumulate=4).train(12) == [LR(i // 4) for i in range(12)]


def test_with_several_processes_it_is_stepped_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    # As documented: such a schedule counts in batches of one process.
    run = Run()
    monkeypatch.setattr(AcceleratorState, "num_processes", property(lambda self: 2), raising=False)
    run.train(3)
    assert run.scheduler.num_steps == 6


def test_a_skipped_update_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.train(2)
    # The effect of a loss scale that overflowed; there is none on a CPU.
    monkeypatch.setattr(type(run.optimizer), "step_was_skipped", property(lambda self: True))
    run.train(3)
    assert run.scheduler.num_steps == 2


def test_accelerate_steps_once_per_update_and_resumes(tmp_path: Path) -> None:
    first = Run()
    assert isinstance(first.prepared, AcceleratedScheduler)
    used = first.train(7)
    first.accelerator.save_state(str(tmp_path))
    resumed = Run()
    resumed.accelerator.load_state(str(tmp_path))
    assert used + resumed.train(13) == LR.values(range(20))
    assert resumed.prepared.get_last_lr() == [LR(20)]
