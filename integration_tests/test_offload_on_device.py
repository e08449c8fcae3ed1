"""Offload to the host of a device that runs its work later: the bits are a CPU's, in every legal order of the work.

`OPT_ORDERS` is the number of orders for each case.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from parity import Case, Net, Numbers, Spread, Wrapping, grads_of, roles_over
from test_step_on_device import (
    BAD_STEP,
    SHAPES,
    SIZE,
    STEPS,
    LaunchedRule,
    Trained,
    equal,
    launched,
    outcome,
    train_on_host,
)
from torch import nn

from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.buffers.grouping import matrices_whole, nothing_whole
from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.deferred import DeferredRank, run_deferred
from opt_distributed.comm.threads import run_threads
from opt_stack import Optimizer, StepResult, get_optimizer, host_units

pytestmark = pytest.mark.usefixtures(launched.__name__)

NUM_ORDERS = int(os.environ.get("OPT_ORDERS", "2"))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece travels alone, so that copies and updates interleave."""
    monkeypatch.setattr(host_units, "PART_NUMEL", 1)


def built(case: Case, comm: Comm, **fields: Any) -> tuple[nn.Module, Optimizer]:
    net: nn.Module = Net(case.numbers.dtype, SHAPES)
    roles = roles_over(comm)
    if case.wrapping is not Wrapping.PLAIN:
        whole = matrices_whole if case.spread is Spread.WHOLE else nothing_whole
        net = DistributedDataParallel(case.ddp_config, net, groups=roles, is_whole=whole)
    config = replace(case.config, log_num_zeros_in_grad=True)
    if case.numbers is Numbers.FP16:
        config = replace(config, loss_scale_window=2, hysteresis=1)
    offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True}
    hooks = fields.pop("hooks", ())
    optimizer = get_optimizer(replace(config, **offload | fields), [net], {}, pg_collection=roles, hooks=hooks)
    for unit in optimizer.stepper.units:
        if unit.host is None:
            unit.rule = LaunchedRule(unit.rule)
    return net, optimizer


def iterate(model: nn.Module, optimizer: Optimizer, step: int, comm: Comm) -> StepResult:
    grads = grads_of(step, comm.rank, comm.size, SHAPES)
    if step == BAD_STEP and comm.rank == 1:
        grads["first"][2, 3] = torch.inf
    optimizer.scale_loss(model(grads)).backward()
    result = optimizer.step()
    if isinstance(model, DistributedDataParallel):
        model.zero_grad_buffer()
    optimizer.zero_grad()
    return result


def train(case: Case, one: DeferredRank, **fields: Any) -> Trained:
    model, optimizer = built(case, one.comm, **fields)
    return outcome(model, optimizer, [iterate(model, optimizer, step, one.comm) for step in range(STEPS)])


def cases() -> Iterator[Case]:
    for spread in Spread:
        for numbers in Numbers:
            for wrapping in Wrapping:
                rule = "muon" if spread is Spread.WHOLE else "adam"
                yield Case(size=SIZE, spread=spread, numbers=numbers, rule=rule, clips=True, wrapping=wrapping)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_every_order_gives_the_bits_of_a_step_without_offload(case: Case) -> None:
    """One of the steps overflows."""
    expected = run_threads(SIZE, partial(train_on_host, case))
    for seed in range(NUM_ORDERS):
        fields = {"overlap_cpu_optimizer_d2h_h2d": seed % 2 == 0, "optimizer_offload_fraction": (0.5, 1.0)[seed % 2]}
        found = run_deferred(SIZE, partial(train, case, **fields), seed=seed)
        assert all(map(equal, found, expected)), f"seed {seed}"
