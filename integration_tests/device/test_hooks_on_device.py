"""Steps with hooks on the fake accelerator: the host reads nothing, and any order of queued work has a CPU's bits."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from fake_accelerator import DeferredDevice, DeferredRank, HostReadError, run_deferred
from on_device import (
    BAD_STEP,
    NUM_ORDERS,
    SHAPES,
    SIZE,
    STEPS,
    LaunchedRule,
    Trained,
    equal,
    iterate,
    launched_stats,
    outcome,
)
from parity import Case, Net, Numbers, Spread, Wrapping, roles_over
from torch import Tensor, nn

from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import Comm
from opt_distributed.comm.threads import run_threads
from opt_distributed.step import stats
from opt_distributed.step.hooked import HookedStep
from opt_kernels.hooks import (
    CautiousDecay,
    CautiousUpdate,
    CentralizeGradient,
    ClipUpdateRms,
    GivenHooks,
    HookedUpdate,
    Hyperball,
    RelativeUpdate,
    measured,
)
from opt_kernels.works import Batch
from opt_stack import Optimizer, get_optimizer

HOOKS: dict[str, tuple[str, GivenHooks]] = {
    "part of a formula": ("adam", (CautiousDecay(),)),
    "norms": ("adam", (ClipUpdateRms(0.5), CautiousUpdate())),
    "relative": ("muon", {"muon": (RelativeUpdate(),), "adam": (ClipUpdateRms(0.1),)}),
    "row means": ("adam", (CentralizeGradient(), ClipUpdateRms(0.5))),
    "on a sphere": ("muon", {"muon": (Hyperball(),)}),
    "centered": ("muon", {"muon": (CentralizeGradient(),)}),
}
version = measured.version


def launched_version(op: str, function: str, *, backend: str | None, tensors: Sequence[Tensor]) -> Any:
    """The sweep over weights as one queued kernel."""
    sweep = version(op, function, backend=backend, tensors=tensors)

    def launch(batches: Sequence[Batch], *args: Any, **kwargs: Any) -> None:
        device = devices.device_of(tensors[0].device) if tensors else None
        if isinstance(device, DeferredDevice):
            device.mode.queue("move", partial(sweep, batches, *args, **kwargs), ())
        else:
            sweep(batches, *args, **kwargs)

    return launch


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "grad_stats", launched_stats)
    monkeypatch.setattr(measured, "version", launched_version)


def cases() -> Iterator[tuple[str, Case]]:
    for name, (rule, _) in HOOKS.items():
        spreads = (Spread.WHOLE,) if rule == "muon" else (Spread.FLAT, Spread.REPLICATED)
        for spread in spreads:
            for numbers, wrapping in ((Numbers.FP16, Wrapping.PLAIN), (Numbers.REMAINDER, Wrapping.OVERLAP)):
                yield name, Case(size=SIZE, spread=spread, numbers=numbers, rule=rule, clips=True, wrapping=wrapping)


def built(name: str, case: Case, comm: Comm) -> tuple[nn.Module, Optimizer]:
    net: nn.Module = Net(case.numbers.dtype, SHAPES)
    roles = roles_over(comm)
    if case.wrapping is not Wrapping.PLAIN:
        net = DistributedDataParallel(case.ddp_config, net, groups=roles, optimizer_config=case.config)
    config = replace(case.config, log_num_zeros_in_grad=True, weight_decay=0.0 if "sphere" in name else 0.1)
    if case.numbers is Numbers.FP16:
        config = replace(config, loss_scale_window=2, hysteresis=1)
    return net, get_optimizer(config, [net], {}, pg_collection=roles, hooks=HOOKS[name][1])


def on_host(name: str, case: Case, comm: Comm) -> Trained:
    model, optimizer = built(name, case, comm)
    return outcome(model, optimizer, [iterate(model, optimizer, step, comm) for step in range(STEPS)])


def launch_rules_(optimizer: Optimizer) -> None:
    for unit in optimizer.stepper.units:
        if isinstance(unit.rule, HookedUpdate):
            unit.rule = replace(unit.rule, rule=LaunchedRule(unit.rule.rule))
        else:
            unit.rule = LaunchedRule(unit.rule)


def on_device(name: str, case: Case, one: DeferredRank) -> Trained:
    model, optimizer = built(name, case, one.comm)
    launch_rules_(optimizer)
    with one.device.host_reads_forbidden():
        results = [iterate(model, optimizer, step, one.comm) for step in range(STEPS)]
    return outcome(model, optimizer, results)


@pytest.mark.parametrize(("name", "case"), list(cases()), ids=str)
def test_the_host_reads_nothing_and_every_order_gives_the_bits_of_a_cpu(name: str, case: Case) -> None:
    """In one of the steps gradients overflow."""
    expected = run_threads(SIZE, partial(on_host, name, case))
    assert [result[0] for result in expected[0].results] == [step != BAD_STEP for step in range(STEPS)]
    for seed in range(NUM_ORDERS):
        assert all(map(equal, run_deferred(SIZE, partial(on_device, name, case), seed=seed), expected)), f"seed {seed}"


NORMS = Case(size=SIZE, spread=Spread.FLAT, numbers=Numbers.FP16, rule="adam", clips=True, wrapping=Wrapping.PLAIN)


def a_norm_is_read(patch: pytest.MonkeyPatch) -> None:
    finish = HookedStep.finish_

    def reading(step: HookedStep, *, skip: Tensor | None = None) -> None:
        float(step.calls[0].sums[0, 0])
        finish(step, skip=skip)

    patch.setattr(HookedStep, "finish_", reading)


def a_skipped_step_moves_weights(patch: pytest.MonkeyPatch) -> None:
    finish = HookedStep.finish_
    patch.setattr(HookedStep, "finish_", lambda step, *, skip=None: finish(step, skip=None))


@pytest.mark.parametrize("plant", [a_norm_is_read, a_skipped_step_moves_weights])
def test_a_fault_is_noticed(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_threads(SIZE, partial(on_host, "norms", NORMS))
    plant(monkeypatch)
    try:
        found = run_deferred(SIZE, partial(on_device, "norms", NORMS), seed=0)
    except HostReadError:
        return
    assert not all(map(equal, found, expected))
