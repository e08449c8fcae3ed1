"""A step that stays on the device: the host reads nothing, work runs in any legal order, and the bits are a CPU's.

More orders at night.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fake_accelerator import DeferredComm, DeferredDevice, DeferredRank, run_deferred
from on_device import (
    SHAPES,
    SIZE,
    STEPS,
    Trained,
    assert_every_order_has_the_bits_of_a_cpu,
    built,
    equal,
    iterate,
    launch_rules_,
    launched,
    layouts,
    outcome,
)
from parity import Case, Numbers, Spread, Wrapping, grads_of
from torch import Tensor, nn

from opt_distributed import run_threads
from opt_distributed.buffers import UnusableGradientError
from opt_distributed.comm import Comm
from opt_distributed.comm import device as devices
from opt_distributed.comm.device import HostCopy
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
from opt_stack import Optimizer, StepStats

pytestmark = pytest.mark.usefixtures(launched.__name__)


@pytest.mark.parametrize("case", layouts(), ids=str)
def test_the_host_reads_nothing_and_every_order_gives_the_bits_of_a_cpu(case: Case) -> None:
    assert_every_order_has_the_bits_of_a_cpu(case)


FLAT = Case(
    size=SIZE, spread=Spread.FLAT, numbers=Numbers.FP16, rule="adam", clips=True, wrapping=Wrapping.PLAIN
)  # fmt: skip


BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.uint8
FORMATS: dict[str, dict[str, Any]] = {
    "scaled fp16 mains": {"main_params_dtype": FP16},
    "24-bit mains": {"main_params_dtype": torch.int8},
    "bf16 gradients and moments": {"main_grads_dtype": BF16, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "scaled fp16 moments": {"exp_avg_dtype": FP16, "exp_avg_sq_dtype": FP16},
    "24-bit mains and fp8 moments": {"main_params_dtype": torch.int8, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8},
}


@pytest.mark.parametrize("spread", [Spread.REPLICATED, Spread.FLAT])
@pytest.mark.parametrize("name", FORMATS)
def test_so_do_main_values_moments_and_gradients_in_other_formats(name: str, spread: Spread) -> None:
    case = replace(FLAT, spread=spread, numbers=Numbers.BF16)
    assert_every_order_has_the_bits_of_a_cpu(case, use_precision_aware_optimizer=True, **FORMATS[name])


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


def cases_with_hooks() -> Iterator[tuple[str, Case]]:
    for name, (rule, _) in HOOKS.items():
        for spread in (Spread.WHOLE,) if rule == "muon" else (Spread.FLAT, Spread.REPLICATED):
            for numbers, wrapping in ((Numbers.FP16, Wrapping.PLAIN), (Numbers.REMAINDER, Wrapping.OVERLAP)):
                yield name, Case(size=SIZE, spread=spread, numbers=numbers, rule=rule, clips=True, wrapping=wrapping)


@pytest.mark.parametrize(("name", "case"), list(cases_with_hooks()), ids=str)
def test_so_do_steps_with_hooks(name: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "version", launched_version)
    decay = 0.0 if "sphere" in name else 0.1
    assert_every_order_has_the_bits_of_a_cpu(case, hooks=HOOKS[name][1], weight_decay=decay)


@pytest.mark.parametrize("size", [1, SIZE])
def test_a_step_waits_for_the_verdict_of_the_one_before_and_for_nothing_else(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only exception: errors of other ranks must be raised even if results are never read. A process without other
    ranks waits for nothing."""
    waited: list[HostCopy] = []
    wait = HostCopy.wait

    def noted(copy: HostCopy) -> Tensor:
        if not copy.arrives(0.0):  # reading what has arrived is no waiting
            waited.append(copy)
        return wait(copy)

    monkeypatch.setattr(HostCopy, "wait", noted)

    def rank_main(one: DeferredRank) -> list[bool]:
        model, optimizer = built(replace(FLAT, size=size), one.comm)
        launch_rules_(optimizer)
        verdicts: list[HostCopy] = []
        found = []
        with one.device.host_reads_forbidden():
            for step in range(STEPS):
                iterate(model, optimizer, step, one.comm)
                found.append({copy for copy in waited if copy._device is one.device} <= set(verdicts))
                assert optimizer.stepper.last is not None
                verdicts += [optimizer.stepper.last._copy] if size > 1 else []
        return found

    assert run_deferred(size, rank_main, seed=0) == [[True] * STEPS] * size


def recorded(case: Case, one: DeferredRank | None, comm: Comm, **changes: Any) -> list[StepStats]:
    model, optimizer = built(case, comm, **changes)
    records: list[StepStats] = []
    optimizer.stats_every(1, records.append)
    if one is not None:
        launch_rules_(optimizer)
    with nullcontext() if one is None else one.device.host_reads_forbidden():
        for step in range(STEPS):
            iterate(model, optimizer, step, comm)
    optimizer.stats()
    return records


@pytest.mark.parametrize("wrapping", Wrapping)
@pytest.mark.parametrize("graphs", [False, True])
def test_recorded_numbers_are_those_of_a_cpu(wrapping: Wrapping, graphs: bool) -> None:
    case = replace(FLAT, wrapping=wrapping)
    expected = run_threads(SIZE, lambda comm: recorded(case, None, comm))
    on_device = lambda one: recorded(case, one, one.comm, optimizer_cuda_graph=graphs)
    for found in run_deferred(SIZE, on_device, seed=0):
        assert [stats.step for stats in found] == [stats.step for stats in expected[0]]
        for stats, other in zip(found, expected[0], strict=True):
            assert stats.success == other.success
            assert stats.rank_norms == pytest.approx(other.rank_norms, nan_ok=True)
            for name, numbers in stats.params.items():
                assert list(numbers) == pytest.approx(list(other.params[name]), nan_ok=True), (stats.step, name)


def moved(model: nn.Module, optimizer: Optimizer) -> Any:
    data = model.first.weight.data
    model.first.weight.data = data.clone()
    return lambda: setattr(model.first.weight, "data", data)


def without_rate(model: nn.Module, optimizer: Optimizer) -> Any:
    group = optimizer.param_groups[0]
    lr, group["lr"] = group["lr"], None
    return lambda: group.update(lr=lr)


def renamed(model: nn.Module, optimizer: Optimizer) -> Any:
    group = optimizer.param_groups[0]
    name, group["name"] = group["name"], "other"
    return lambda: group.update(name=name)


# objection of the last rank, its error there, and on the other ranks
OBJECTIONS = [
    (moved, "StorageError", "StorageError"),
    (without_rate, "ValueError", "UnusableGradientError"),
    (renamed, "GroupError", "UnusableGradientError"),
]


def objecting(comm: Comm, *, prepare: Any) -> list[tuple[str, bool]]:
    """Of six steps, to the second of which the last rank objects: the error, and whether a weight has moved. Results
    are not read."""
    model, optimizer = built(replace(FLAT, numbers=Numbers.FP32, size=comm.size), comm)
    found = []
    for step in (2, 3, 4, 5, 6, 7):
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.scale_loss(model(grads_of(step, comm.rank, SIZE, SHAPES))).backward()
        undo = prepare(model, optimizer) if step == 3 and comm.rank == comm.size - 1 else lambda: None
        error = ""
        try:
            optimizer.step()
        except (ValueError, UnusableGradientError) as caught:
            error = type(caught).__name__
        undo()
        optimizer.zero_grad()
        found.append((error, not all(map(torch.equal, before, model.parameters()))))
    return found


@pytest.mark.parametrize(("prepare", "own", "other"), OBJECTIONS)
def test_the_objection_of_a_rank_is_raised_in_the_same_step_on_every_rank(prepare: Any, own: str, other: str) -> None:
    """The objecting rank raised at once, the others in the next step; with a wrong group it left the others waiting."""
    for seed in range(3):
        found = run_deferred(SIZE, lambda one: objecting(one.comm, prepare=prepare), seed=seed)
        errors = [[error for error, _ in of_rank] for of_rank in found]
        assert errors == [["", "", error, "", "", ""] for error in (*[other] * (SIZE - 1), own)]
        moves = [True, False, False, True, True, True]
        assert [[has_moved for _, has_moved in of_rank] for of_rank in found] == [moves] * SIZE


@pytest.mark.parametrize(("prepare", "own"), [(without_rate, "ValueError"), (renamed, "GroupError")])
def test_a_rank_without_others_raises_its_objection_at_once(prepare: Any, own: str) -> None:
    (found,) = run_deferred(1, lambda one: objecting(one.comm, prepare=prepare), seed=0)
    assert [error for error, _ in found] == ["", own, "", "", "", ""]


def some_unused(comm: Comm) -> Trained:
    """first has a gradient on rank 1 only, and router on none but in the third step."""
    model, optimizer = built(FLAT, comm)
    if isinstance(comm, DeferredComm):
        launch_rules_(optimizer)
    results = []
    for step in range(STEPS):
        left_out = {"router"} if comm.rank == 1 else {"router", "first"}
        grads = {name: grad for name, grad in grads_of(step, comm.rank, SIZE, SHAPES).items() if name not in left_out}
        if step == 2:
            grads["router"] = grads_of(step, comm.rank, SIZE, SHAPES)["router"]
        losses = [module(grads[name]) for name, module in model.named_children() if name in grads]
        optimizer.scale_loss(torch.stack(losses).sum()).backward()
        results.append(optimizer.step())
        optimizer.zero_grad()
    return outcome(model, optimizer, results)


def test_parameters_that_no_rank_used_keep_value_state_and_count() -> None:
    """A rank that lacks a gradient reads which other ranks have one: the exception of plain modules."""
    expected = run_threads(SIZE, some_unused)
    assert sorted(set(expected[0].steps) | set(expected[1].steps)) == [1.0, 4.0]
    for seed in range(5):
        found = run_deferred(SIZE, lambda one: some_unused(one.comm), seed=seed)
        assert all(map(equal, found, expected))
