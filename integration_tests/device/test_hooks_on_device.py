"""Steps with hooks on the fake accelerator: the host reads nothing, and any order of queued work has a CPU's bits."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from fake_accelerator import DeferredDevice, HostReadError, run_deferred
from on_device import (
    SIZE,
    assert_every_order_has_the_bits_of_a_cpu,
    equal,
    launched_stats,
    train_on_device,
    train_on_host,
)
from parity import Case, Numbers, Spread, Wrapping
from torch import Tensor

from opt_distributed import run_threads
from opt_distributed.comm import device as devices
from opt_distributed.step import stats
from opt_distributed.step.hooked import HookedStep
from opt_kernels.hooks import (
    CautiousDecay,
    CautiousUpdate,
    CentralizeGradient,
    ClipUpdateRms,
    GivenHooks,
    Hyperball,
    RelativeUpdate,
    measured,
)
from opt_kernels.works import Batch

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


def changes_of(name: str) -> dict[str, Any]:
    return {"hooks": HOOKS[name][1], "weight_decay": 0.0 if "sphere" in name else 0.1}


@pytest.mark.parametrize(("name", "case"), list(cases()), ids=str)
def test_the_host_reads_nothing_and_every_order_gives_the_bits_of_a_cpu(name: str, case: Case) -> None:
    assert_every_order_has_the_bits_of_a_cpu(case, **changes_of(name))


NORMS = Case(size=SIZE, spread=Spread.FLAT, numbers=Numbers.FP16, rule="adam", clips=True, wrapping=Wrapping.PLAIN)


def a_norm_is_read(patch: pytest.MonkeyPatch) -> None:
    finish = HookedStep.finish_

    def reading(step: HookedStep, *, skip: Tensor | None = None) -> None:
        float(step.sums[0, 0])
        finish(step, skip=skip)

    patch.setattr(HookedStep, "finish_", reading)


def a_skipped_step_moves_weights(patch: pytest.MonkeyPatch) -> None:
    finish = HookedStep.finish_
    patch.setattr(HookedStep, "finish_", lambda step, *, skip=None: finish(step, skip=None))


@pytest.mark.parametrize("plant", [a_norm_is_read, a_skipped_step_moves_weights])
def test_a_fault_is_noticed(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_threads(SIZE, partial(train_on_host, NORMS, **changes_of("norms")))
    plant(monkeypatch)
    try:
        found = run_deferred(SIZE, partial(train_on_device, NORMS, **changes_of("norms")), seed=0)
    except HostReadError:
        return
    assert not all(map(equal, found, expected))
