"""A step that stays on the device: the host reads nothing, work runs in any legal order, and the bits are a CPU's.

More orders at night.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import on_device
import pytest
import torch
from fake_accelerator import DeferredComm, DeferredRank, run_deferred
from on_device import ALL, FLAT, HALF, OVERLAPS, SHAPES, SIZE, STEPS, Trained, built, iterate, launch_rules_, launched
from parity import Case, Numbers, Spread, Wrapping, grads_of
from tiers import in_turn
from torch import Tensor, nn

from opt_distributed import run_threads
from opt_distributed.buffers import UnusableGradientError
from opt_distributed.comm import Comm
from opt_distributed.comm.device import HostCopy
from opt_kernels import hooks
from opt_kernels.hooks import measured
from opt_kernels.quantized import RECIPES
from opt_kernels.works import Batch
from opt_stack import Optimizer, StepStats
from opt_stack.building import units
from opt_stack.planning import design

pytestmark = pytest.mark.usefixtures(launched.__name__)

BF16 = torch.bfloat16
FP16 = torch.float16
FP8 = torch.uint8
FORMATS: dict[str, dict[str, Any]] = {
    "scaled fp16 mains": {"main_params_dtype": FP16},
    "24-bit mains": {"main_params_dtype": torch.int8},
    "bf16 gradients and moments": {"main_grads_dtype": BF16, "exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "scaled fp16 moments": {"exp_avg_dtype": FP16, "exp_avg_sq_dtype": FP16},
    "24-bit mains and fp8 moments": {"main_params_dtype": torch.int8, "exp_avg_dtype": FP8, "exp_avg_sq_dtype": FP8},
}
HOOKS: dict[str, dict[str, Any]] = {
    "part of a formula": {"hooks": (hooks.CautiousDecay(),)},
    "norms": {"hooks": (hooks.ClipUpdateRms(0.5), hooks.CautiousUpdate())},
    "row means": {"hooks": (hooks.CentralizeGradient(), hooks.ClipUpdateRms(0.5))},
    "relative": {"hooks": {"muon": (hooks.RelativeUpdate(),), "adam": (hooks.ClipUpdateRms(0.1),)}},
    "on a sphere": {"hooks": {"muon": (hooks.Hyperball(),)}, "weight_decay": 0.0},
    "centered": {"hooks": {"muon": (hooks.CentralizeGradient(),)}},
}


def cases() -> Iterator[tuple[str, Case, Mapping[str, Any]]]:
    for case in on_device.layouts():
        yield str(case), case, {}
    for (name, fields), spread in in_turn(FORMATS.items(), (Spread.REPLICATED, Spread.FLAT)):
        case = replace(FLAT, spread=spread, numbers=Numbers.BF16)
        yield f"{name}, {spread.value}", case, {"use_precision_aware_optimizer": True, **fields}
    layouts = [(Spread.FLAT, Wrapping.OVERLAP), (Spread.REPLICATED, Wrapping.PLAIN), (Spread.FLAT, Wrapping.WRAPPED)]
    for recipe, (spread, wrapping) in in_turn([*RECIPES] * 2, [*layouts, (Spread.FLAT, Wrapping.PLAIN)]):
        case = replace(FLAT, spread=spread, numbers=Numbers.BF16, wrapping=wrapping)
        yield f"{recipe}, {case}", case, {"fp8_recipe": recipe}
    of_hooks = [(Numbers.FP16, Wrapping.PLAIN), (Numbers.REMAINDER, Wrapping.OVERLAP)]
    for (name, fields), (numbers, wrapping) in in_turn(HOOKS.items(), of_hooks):
        is_muon = isinstance(fields["hooks"], dict)
        for spread in (Spread.WHOLE,) if is_muon else (Spread.FLAT, Spread.REPLICATED):
            case = replace(FLAT, spread=spread, rule="muon" if is_muon else "adam", numbers=numbers, wrapping=wrapping)
            yield f"{name}, {case}", case, fields
    for rule, spread in (("soap", Spread.WHOLE), ("adaptive_muon", Spread.WHOLE), ("lion", Spread.FLAT)):
        yield rule, replace(FLAT, numbers=Numbers.BF16, rule=rule, spread=spread), {}


CASES = {name: (case, fields) for name, case, fields in cases()}
version = measured.version


def launched_version(op: str, function: str, *, backend: str | None, tensors: Sequence[Tensor]) -> Any:
    """The sweep of a hook over weights as one queued kernel."""
    sweep = version(op, function, backend=backend, tensors=tensors)

    def launch(batches: Sequence[Batch], *args: Any, **kwargs: Any) -> None:
        on_device.queued("move", partial(sweep, batches, *args, **kwargs))

    return launch


@pytest.mark.parametrize("name", [name for name in CASES if name != "soap"])  # whose update reads on the host
def test_step_never_syncs_and_any_order_gives_the_bits_of_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "version", launched_version)
    # More buckets than have memory of their own.
    monkeypatch.setattr(design, "default_bucket_size", lambda num_ranks: 1)
    case, fields = CASES[name]
    on_device.assert_bits_of_a_cpu(case, **fields)


OFFLOADS = {"half": HALF | OVERLAPS, "all": ALL}
OFFLOADED = [name for name in CASES if "fp8_recipe" not in CASES[name][1]]


@pytest.mark.parametrize(("name", "offload"), in_turn(OFFLOADED, [*OFFLOADS]))
def test_offloaded_state_gives_the_bits_of_a_cpu_in_any_order(
    name: str, offload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each piece is copied separately, so that copies and updates interleave.
    monkeypatch.setattr(units, "PART_NUMEL", 1)
    case, fields = CASES[name]
    on_device.assert_bits_of_a_cpu(case, on_device=(OFFLOADS[offload],), **fields)


@pytest.mark.parametrize("size", [1, SIZE])
def test_a_step_waits_only_for_the_verdict_of_the_last_one(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
        for step in range(STEPS):
            iterate(model, optimizer, step, one.comm)
            found.append({copy for copy in waited if copy._device is one.device} <= set(verdicts))
            assert optimizer.stepper.last is not None
            verdicts += [optimizer.stepper.last._copy] if size > 1 else []
        return found

    assert run_deferred(size, rank_main, seed=0) == [[True] * STEPS] * size


def recorded(case: Case, comm: Comm, **changes: Any) -> list[StepStats]:
    model, optimizer = built(case, comm, **changes)
    if isinstance(comm, DeferredComm):
        launch_rules_(optimizer)
    records: list[StepStats] = []
    optimizer.stats_every(1, records.append)
    for step in range(STEPS):
        iterate(model, optimizer, step, comm)
    optimizer.stats()
    return records


@pytest.mark.parametrize(("wrapping", "graphs"), in_turn(Wrapping, [True, False]))
def test_recorded_numbers_are_those_of_a_cpu(wrapping: Wrapping, graphs: bool) -> None:
    case = replace(FLAT, wrapping=wrapping)
    expected = run_threads(SIZE, partial(recorded, case))[0]
    for found in run_deferred(SIZE, lambda one: recorded(case, one.comm, optimizer_cuda_graph=graphs), seed=0):
        for stats, other in zip(found, expected, strict=True):
            assert (stats.step, stats.success) == (other.step, other.success)
            assert stats.rank_norms == pytest.approx(other.rank_norms, nan_ok=True)
            for name, numbers in stats.params.items():
                assert list(numbers) == pytest.approx(list(other.params[name]), nan_ok=True), (stats.step, name)


# --- objections of one rank -------------------------------------------------------------------------------------------

Undo = Callable[[], object]


def converted(model: nn.Module, optimizer: Optimizer) -> Undo:
    data = model.first.weight.data
    model.first.weight.data = data.double()
    return lambda: setattr(model.first.weight, "data", data)


def with_entry(name: str, value: Any) -> Callable[[nn.Module, Optimizer], Undo]:
    def change(model: nn.Module, optimizer: Optimizer) -> Undo:
        group = optimizer.param_groups[0]
        before = group[name]
        group[name] = value
        return lambda: group.update({name: before})

    return change


def without_gradient(model: nn.Module, optimizer: Optimizer) -> Undo:
    model.router.weight.grad = None
    return lambda: None


# What one rank does, the error that it raises, and the error that the other ranks raise.
OBJECTIONS: dict[str, tuple[Callable[[nn.Module, Optimizer], Undo], str, str]] = {
    "converted": (converted, "StorageError", "StorageError"),
    "without a rate": (with_entry("lr", None), "ValueError", "UnusableGradientError"),
    "renamed": (with_entry("name", "other"), "GroupError", "UnusableGradientError"),
}
OF_REPLAYS = {
    **OBJECTIONS,
    "another rate": (with_entry("lr", 1.0), "HyperError", "HyperError"),
    "without a gradient": (without_gradient, "UnusableGradientError", "UnusableGradientError"),
}


def objecting(one: DeferredRank, *, name: str, graphs: bool) -> tuple[list[str], list[bool]]:
    """Of six steps, to the fourth of which the last rank objects: errors, and whether a weight has moved. Results are
    not read."""
    fields = {"numbers": Numbers.FP32, "size": one.size}
    model, optimizer = built(replace(FLAT, **fields), one.comm, optimizer_cuda_graph=graphs)
    launch_rules_(optimizer)
    errors = []
    moves = []
    for step in range(6):
        before = [param.detach().clone() for param in model.parameters()]
        on_device.backward(model, optimizer, step, one.comm)
        objects = step == 3 and one.rank == one.size - 1
        undo = OF_REPLAYS[name][0](model, optimizer) if objects else lambda: None
        errors.append("")
        try:
            optimizer.step()
        except (ValueError, UnusableGradientError) as caught:
            errors[-1] = type(caught).__name__
        undo()
        optimizer.zero_grad()
        moves.append(not all(map(torch.equal, before, model.parameters())))
    return errors, moves


@pytest.mark.parametrize(
    ("name", "graphs"), [(name, False) for name in OBJECTIONS] + [(name, True) for name in OF_REPLAYS]
)
def test_a_refusal_of_one_rank_is_raised_in_that_step_on_all(name: str, graphs: bool) -> None:
    """The objecting rank raised at once, the others in the next step; with a wrong group it left the others waiting."""
    _, own, other = OF_REPLAYS[name]
    moves = [True, True, True, False, False, True]
    expected = [(["", "", "", "", error, ""], moves) for error in (*[other] * (SIZE - 1), own)]
    for seed in range(on_device.NUM_ORDERS):
        assert run_deferred(SIZE, partial(objecting, name=name, graphs=graphs), seed=seed) == expected


@pytest.mark.parametrize("name", ["without a rate", "renamed"])
def test_a_rank_without_others_raises_its_objection_at_once(name: str) -> None:
    ((errors, _),) = run_deferred(1, partial(objecting, name=name, graphs=False), seed=0)
    assert errors == ["", "", "", OBJECTIONS[name][1], "", ""]


def some_unused(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
    """first has a gradient on rank 1 only, and router on none but in the third step."""
    results = []
    for step in range(STEPS):
        left_out = {"router"} if comm.rank == 1 else {"router", "first"}
        grads = grads_of(step, comm.rank, SIZE, SHAPES)
        used = [name for name in grads if name not in left_out or (step == 2 and name == "router")]
        losses = [getattr(model, name)(grads[name]) for name in used]
        optimizer.scale_loss(torch.stack(losses).sum()).backward()
        results.append(optimizer.step())
        optimizer.zero_grad()
    found = on_device.outcome(model, optimizer, results)
    assert set(found.steps) <= {1.0, 4.0}
    return found


def test_parameters_that_no_rank_used_keep_value_state_and_count() -> None:
    """A rank that lacks a gradient reads which other ranks have one: the exception of plain modules."""
    on_device.assert_bits_of_a_cpu(FLAT, some_unused, num_orders=5)
