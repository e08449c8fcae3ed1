"""Training with offload on the fake accelerator."""

from typing import Any

import pytest
from fake_accelerator import DeferredRank
from on_device import (
    STEPS,
    Trained,
    iterate,
    launch_rules_,
    outcome,
)
from on_device import built as built_on_device
from parity import Case
from torch import nn

from opt_distributed.comm import Comm
from opt_stack import Optimizer, build

HALF: dict[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
ALL = HALF | {"optimizer_offload_fraction": 1.0, "overlap_cpu_optimizer_d2h_h2d": True}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy each piece separately, so that copies and updates interleave."""
    monkeypatch.setattr(build, "PART_NUMEL", 1)


def built(case: Case, comm: Comm, **fields: Any) -> tuple[nn.Module, Optimizer]:
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True}
    net, optimizer = built_on_device(case, comm, **offload | fields)
    launch_rules_(optimizer)
    return net, optimizer


def train(case: Case, one: DeferredRank, **fields: Any) -> Trained:
    model, optimizer = built(case, one.comm, **fields)
    return outcome(model, optimizer, [iterate(model, optimizer, step, one.comm) for step in range(STEPS)])
