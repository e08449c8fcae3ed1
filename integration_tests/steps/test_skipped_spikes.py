"""Steps that are skipped as spikes (`skip_sigma`), and the losses that ranks note for them."""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grids import comms_of
from on_device import FLAT, SHAPES, SIZE, Trained, assert_bits_of_a_cpu, launched, outcome, with_copies, zero
from parity import Case, Numbers, roles_over
from torch import nn

from opt_checkpoint import load, save, sharded_model
from opt_config import ConfigError, OptimizerConfig, ParamKey
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_stack import Optimizer, StepStats, get_optimizer, release_gradients, why

WINDOW = 8
SPIKES: dict[str, Any] = {"skip_sigma": 6.0, "skip_window": WINDOW}
SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}
SKIPS = "ignore:step .* was skipped:opt_stack.SkippedStepWarning"
pytestmark = pytest.mark.filterwarnings(SKIPS)


def make(comm: Comm | None = None, roles: Roles | None = None, **fields: Any) -> tuple[nn.Module, Optimizer]:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.linspace(-0.5, 0.5, param.numel()).view_as(param))
    if comm is not None:
        roles = roles_over(comm)
    return net, get_optimizer(OptimizerConfig(lr=0.01, **{**SPIKES, **fields}), [net], pg_collection=roles)


def step(net: nn.Module, optimizer: Optimizer, at: int, *, factor: float = 1.0, losses: Any = ()) -> bool:
    batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(at))
    (factor * net(batch).square().mean()).backward()
    for loss in losses:
        optimizer.note_loss(loss)
    success = optimizer.step().success
    optimizer.zero_grad()
    return success


def everything(net: nn.Module, optimizer: Optimizer) -> list[Any]:
    saved = with_copies(optimizer.state_dict())
    weights = [param.detach().clone() for param in net.parameters()]
    return [*weights, *(tensor for state in saved["state"].values() for tensor in state.values())]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("layout", [{}, SHARDED], ids=["replicated", "sharded"])
def test_a_spike_on_one_rank_changes_nothing_on_any(layout: dict[str, Any]) -> None:
    def rank_main(comm: Comm) -> str:
        net, optimizer = make(comm, **layout)
        assert all(step(net, optimizer, at) for at in range(12))
        before = everything(net, optimizer)
        assert not step(net, optimizer, 12, factor=1e3 if comm.rank else 1.0)
        assert same(everything(net, optimizer), before)
        assert all(step(net, optimizer, at) for at in range(13, 16))
        assert not same(everything(net, optimizer), before)
        return optimizer.report()

    first, second = run_threads(2, rank_main)
    assert first == second
    assert "16 steps: 15 applied, 1 skipped or refused\n  1 time (step 13): was skipped on every rank: the gra" in first
    assert " is a spike above " in first
    assert "6 deviations (skip_sigma) above the mean of the last 8 steps; the largest is that of '2.weight'" in first


@pytest.mark.parametrize("form", ["sharded", "of one rank"])
def test_a_run_resumed_before_the_spike_refuses_it_too(form: str, tmp_path: Path) -> None:
    def trained(net: nn.Module, optimizer: Optimizer) -> tuple[bool, list[Any]]:
        losses = [0.5]
        spike = step(net, optimizer, 12, factor=1e3, losses=losses)
        return spike, [step(net, optimizer, 13, losses=[500.0]), *everything(net, optimizer)]

    net, optimizer = make()
    for at in range(12):
        step(net, optimizer, at, losses=[1.0 + 0.01 * at])
    other, resumed = make()
    if form == "sharded":
        described = sharded_model(net)
        save({"model": described, "optimizer": optimizer.sharded_state_dict(described)}, tmp_path / "a")
        described = sharded_model(other)
        state = {"model": described, "optimizer": resumed.sharded_state_dict(described)}
        resumed.load_state_dict(load(state, tmp_path / "a").state["optimizer"])
    else:
        torch.save([net.state_dict(), optimizer.state_dict()], tmp_path / "a")
        weights, saved = torch.load(tmp_path / "a")
        other.load_state_dict(weights)
        resumed.load_state_dict(saved)
    spike, after = trained(net, optimizer)
    assert (spike, after[0]) == (False, False)  # the norm, then the loss
    found, of_resumed = trained(other, resumed)
    assert (found, of_resumed[0]) == (False, False)
    assert same(of_resumed[1:], after[1:])


def test_a_state_without_spikes_starts_the_window_anew() -> None:
    net, optimizer = make()
    for at in range(12):
        step(net, optimizer, at)
    _, without = make(skip_sigma=math.inf, skip_window=128)
    saved = without.state_dict()
    assert "spikes" not in saved
    optimizer.load_state_dict(saved)
    assert optimizer.stepper.spikes.state_dict()["grad_norms"]["values"] == []
    bad = {**saved, "spikes": {"losses": {"values": ["x"]}}}
    with pytest.raises(ValueError, match="spikes: losses="):
        optimizer.load_state_dict(bad)
    without.load_state_dict(bad)  # it needs none


def resumed_from(net: nn.Module, optimizer: Optimizer, path: Path, **fields: Any) -> Optimizer:
    described = sharded_model(net)
    save({"model": described, "optimizer": optimizer.sharded_state_dict(described)}, path)
    other, resumed = make(**fields)
    described = sharded_model(other)
    loaded = load({"model": described, "optimizer": resumed.sharded_state_dict(described)}, path)
    resumed.load_state_dict(loaded.state["optimizer"])
    return resumed


def test_a_resumed_run_may_begin_to_skip_and_to_scale(tmp_path: Path) -> None:
    """A run that diverged goes on from its last checkpoint; missing keys refused that."""
    without = {"skip_sigma": math.inf, "skip_window": 128}
    net, optimizer = make(**without)
    step(net, optimizer, 0)
    resumed = resumed_from(net, optimizer, tmp_path / "a")
    assert resumed.stepper.spikes.state_dict()["losses"] == {"values": [], "num_above": 0}
    scales = {"fp16": True, "initial_loss_scale": 8.0}
    scaled = resumed_from(net, optimizer, tmp_path / "b", **without, **scales)
    assert scaled.get_loss_scale() == 8.0


def test_ranks_that_loaded_other_windows_are_refused() -> None:
    def rank_main(comm: Comm) -> None:
        net, optimizer = make(comm)
        for at in range(10):
            step(net, optimizer, at)
        saved = with_copies(optimizer.state_dict())
        if comm.rank == 1:
            del saved["spikes"]
        other, resumed = make(comm)
        other.load_state_dict(net.state_dict())
        resumed.load_state_dict(saved)
        with pytest.raises(ValueError, match="ranks have different norms or losses of the last steps"):
            step(other, resumed, 10)

    run_threads(2, rank_main)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_norms_enter_where_other_code_writes_weights(num_ranks: int) -> None:
    """The comparison of what was written kept them out, and so there was no limit."""

    def rank_main(comm: Comm) -> bool:
        net, optimizer = make(comm)
        for at in range(12):
            step(net, optimizer, at)
            with torch.no_grad():
                for param in net.parameters():
                    param.clamp_(-1.0, 1.0)
        return step(net, optimizer, 12, factor=1e4)

    assert run_threads(num_ranks, rank_main) == [False] * num_ranks


def test_a_limit_on_a_norm_without_gradients_is_refused() -> None:
    unclipped: Any = {ParamKey(name="*"): {"clip_grad": False}}
    with pytest.raises(ConfigError, match=r"grad_norm_skip_threshold=3\.0 has no effect: no parameter is part of the"):
        get_optimizer(OptimizerConfig(lr=0.1, grad_norm_skip_threshold=3.0), [nn.Linear(3, 2)], unclipped)
    get_optimizer(OptimizerConfig(lr=0.1, **SPIKES), [nn.Linear(3, 2)], unclipped)  # losses may be noted


# --- losses -----------------------------------------------------------------------------------------------------------

# Per rank, what it notes in a step; the loss of the step.
NOTED: dict[str, tuple[Callable[[int], list[Any]], float | None]] = {
    "never": (lambda rank: [], None),
    "on the last rank": (lambda rank: [3.0] if rank == 1 else [], 3.0),
    "several times, not equally often": (lambda rank: [torch.tensor([[1.0]]), 2.0, 6.0] if rank else [7], 4.0),
    "in bf16 with a graph": (lambda rank: [torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True) * 2], 3.0),
    "NaN on one rank": (lambda rank: [math.nan if rank else 1.0], math.nan),
    "infinite": (lambda rank: [torch.tensor(math.inf)], math.inf),
}


@pytest.mark.parametrize("noted", NOTED)
@pytest.mark.parametrize("sigma", [6.0, math.inf])
def test_the_loss_of_a_step_is_the_mean_of_all_notes(noted: str, sigma: float) -> None:
    losses, expected = NOTED[noted]
    fields = {"skip_sigma": sigma, "skip_window": WINDOW if sigma < math.inf else 128}

    def rank_main(comm: Comm) -> tuple[list[StepStats], str]:
        net, optimizer = make(comm, **SHARDED, **fields)
        records: list[StepStats] = []
        optimizer.stats_every(1, records.append)
        step(net, optimizer, 0, losses=losses(comm.rank))
        step(net, optimizer, 1)  # the notes are used up
        return records, optimizer.report()

    (first, report), (second, _) = run_threads(2, rank_main)
    assert repr([record.loss for record in first]) == repr([expected, None])
    assert repr([record.loss for record in second]) == repr([expected, None])
    is_good = expected is None or math.isfinite(expected)
    assert [record.success for record in first] == [is_good, True]
    assert first[0].reason == ("" if is_good else "spike of the loss")
    assert (f"the loss was {expected}" in report) is not is_good


def test_a_spike_of_the_loss_is_refused_and_a_lasting_one_not() -> None:
    def rank_main(comm: Comm) -> list[bool]:
        net, optimizer = make(comm)
        of_last = lambda loss: [loss] if comm.rank == 1 else []
        found = [step(net, optimizer, at, losses=of_last(2.0)) for at in range(12)]
        found += [step(net, optimizer, 12), step(net, optimizer, 13, losses=of_last(1e3))]
        found += [step(net, optimizer, 14, losses=of_last(2.0))]
        return found + [step(net, optimizer, 15 + at, losses=of_last(1e3)) for at in range(WINDOW)]

    first, second = run_threads(2, rank_main)
    assert first == second
    assert first[:15] == [True] * 13 + [False, True]
    assert first[15] is False
    assert first[-1] is True


@pytest.mark.parametrize("has_instance", [False, True])
def test_losses_are_summed_over_optimizer_instances(has_instance: bool) -> None:
    shards = comms_of([[0, 1], [2, 3]])
    others = comms_of([[0, 2], [1, 3]])

    def rank_main(comm: Comm) -> float | None:
        axes = Axes(dp=shards[comm.rank], tp=Alone(), inter=others[comm.rank])
        instance = shards[comm.rank] if has_instance else None
        roles = Roles(dense=axes, expert=axes, everyone=comm, instance=instance)
        net, optimizer = make(roles=roles, use_distributed_optimizer=True)
        optimizer.stats_every(1)
        step(net, optimizer, 0, losses=[float(comm.rank)] * comm.rank)
        return optimizer.stats().loss

    assert run_threads(4, rank_main) == [(1 + 2 * 2 + 3 * 3) / 6] * 4


def test_a_loss_of_several_elements_is_refused() -> None:
    _, optimizer = make()
    with pytest.raises(ValueError, match=r"note_loss: the loss has shape \(3,\); pass one element"):
        optimizer.note_loss(torch.ones(3))


def test_a_load_forgets_the_losses_that_were_noted() -> None:
    """The step after a return to the last checkpoint was skipped for the NaN that had led to it."""
    net, optimizer = make()
    saved = optimizer.state_dict()
    optimizer.note_loss(math.nan)
    optimizer.load_state_dict(saved)
    net(torch.ones(3, 4)).square().mean().backward()
    assert optimizer.step().success


@pytest.mark.parametrize("series", [[1.0], {"values": [math.nan]}, {"values": "no"}])
def test_a_window_of_another_form_is_refused_by_name(series: Any) -> None:
    _, optimizer = make()
    saved = optimizer.state_dict()
    saved["spikes"] = {"grad_norms": series}
    with pytest.raises(ValueError, match="spikes: grad_norms="):
        optimizer.load_state_dict(saved)


def test_released_gradients_exclude_spikes_and_losses() -> None:
    _, optimizer = make(clip_grad=0.0)
    with pytest.raises(ConfigError, match=r"skip_sigma=6\.0 needs the norm of all gradients"):
        release_gradients(optimizer)
    _, other = make(clip_grad=0.0, skip_sigma=math.inf, skip_window=128)
    release_gradients(other)
    with pytest.raises(RuntimeError, match="note_loss: gradients are released"):
        other.note_loss(1.0)


# --- beside other reasons ---------------------------------------------------------------------------------------------


def test_the_threshold_is_named_first_and_both_hold() -> None:
    net, optimizer = make(grad_norm_skip_threshold=50.0)
    optimizer.stats_every(1)
    reasons = []
    for at, factor in enumerate([1.0] * 12 + [30.0, 1e5, 1.0]):
        step(net, optimizer, at, factor=factor)
        reasons.append(optimizer.stats().reason)
    assert reasons == [""] * 12 + ["spike of the norm", "norm above the limit", ""]


def test_overflows_and_refused_steps_leave_the_window() -> None:
    net, optimizer = make()
    for at in range(12):
        step(net, optimizer, at, losses=[1.0])
    before = optimizer.stepper.spikes.state_dict()
    assert not step(net, optimizer, 12, factor=math.nan)
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match="lr"):
        step(net, optimizer, 13)
    assert optimizer.stepper.spikes.state_dict() == before


def test_losses_wait_for_the_step_that_is_taken() -> None:
    """A loss of NaN was forgotten where gradients were clipped again, or the step was refused and repeated."""

    def noted(net: nn.Module, optimizer: Optimizer, loss: float) -> None:
        net(torch.ones(3, 4)).square().mean().backward()
        optimizer.note_loss(loss)

    net, optimizer = make()
    noted(net, optimizer, math.nan)
    optimizer.clip_grad_norm_(1.0)
    noted(net, optimizer, 1.0)
    optimizer.clip_grad_norm_(1.0)
    assert not optimizer.step().success
    noted(net, optimizer, 1.0)
    assert optimizer.step().success
    noted(net, optimizer, math.nan)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(ValueError, match="lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = rate
    assert not optimizer.step().success


def test_the_norm_of_a_step_that_is_not_taken_does_not_enter() -> None:
    net, optimizer = make()
    step(net, optimizer, 0, losses=[1.0])
    before = optimizer.stepper.spikes.state_dict()
    net(torch.ones(3, 4)).square().mean().backward()
    optimizer.note_loss(3.0)
    optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()
    assert optimizer.stepper.spikes.state_dict() == before
    step(net, optimizer, 1, losses=[5.0])
    assert optimizer.stepper.spikes.state_dict()["losses"]["values"] == [1.0, 5.0]  # that of the dropped batch is gone


def test_a_load_between_the_halves_of_a_step_sets_the_window() -> None:
    net, optimizer = make()
    saved = optimizer.state_dict()
    for at in range(3):
        step(net, optimizer, at)
    net(torch.ones(3, 4)).square().mean().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert optimizer.stepper.spikes.state_dict()["grad_norms"]["values"] == []


def test_half_steps_and_own_clipping_skip_spikes_too() -> None:
    net, optimizer = make()
    for at in range(12):
        step(net, optimizer, at)
    before = everything(net, optimizer)
    (1e3 * net(torch.ones(16, 4)).square().mean()).backward()
    assert (optimizer.prepare_grads(), optimizer.step_with_ready_grads()) == (False, False)
    optimizer.zero_grad()
    (1e3 * net(torch.ones(16, 4)).square().mean()).backward()
    optimizer.clip_grad_norm_(1.0)
    assert not optimizer.step().success
    assert same(everything(net, optimizer), before)


@pytest.mark.parametrize("of", ["norm", "loss"])
def test_a_recording_names_the_spike(of: str, tmp_path: Path) -> None:
    net, optimizer = make()
    optimizer.stats_every(1, directory=tmp_path)
    for at in range(16):
        is_bad = at == 12
        factor = 1e4 if is_bad and of == "norm" else 1.0
        step(net, optimizer, at, factor=factor, losses=[1e4 if is_bad and of == "loss" else 0.25])
    optimizer.recorder.write("end")
    text = str(why(tmp_path))
    words = {"norm": "gradient norm", "loss": "loss"}[of]
    assert "1 of them skipped" in text
    assert f"First: at step 13 a spike of the {of} skipped the step: the {words} was" in text


def test_a_spike_after_an_overflow_is_named(tmp_path: Path) -> None:
    """Together they were taken for a loss scale that finds its level."""
    net, optimizer = make(fp16=True, initial_loss_scale=8.0, hysteresis=1)
    optimizer.stats_every(1, directory=tmp_path)
    for at in range(18):
        factor = {12: math.inf, 13: 1e4}.get(at, 1.0)
        step(net, optimizer, at, factor=factor * float(optimizer.get_loss_scale()))
    optimizer.recorder.write("end")
    assert "at step 14 a spike of the norm skipped the step" in str(why(tmp_path))


# --- on an accelerator ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures(launched.__name__)
@pytest.mark.parametrize("numbers", [Numbers.FP32, Numbers.FP16])
def test_devices_and_graphs_decide_as_a_cpu_does(numbers: Numbers) -> None:
    """The host reads nothing; loaded windows are those that replays read."""

    def program(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
        results = []
        for at in range(14):
            if at == 9:
                optimizer.load_state_dict(with_copies(optimizer.state_dict()))
            grads = {}
            for name, shape in SHAPES.items():
                grads[name] = torch.full(shape, 0.125 + 0.01 * (at % 3)) * (64.0 if at == 10 else 1.0)
            if comm.rank == 1:
                optimizer.note_loss(torch.tensor(30.0 if at == 12 else 1.0 + at % 2))
            optimizer.scale_loss(model(grads)).backward()
            results.append(optimizer.step())
            zero(model, optimizer)
        found = outcome(model, optimizer, results)
        assert [result[0] for result in found.results] == [at not in (10, 12) for at in range(14)]
        return found

    case: Case = replace(FLAT, numbers=numbers)
    assert case.size == SIZE
    graphs: Mapping[str, Any] = {"optimizer_cuda_graph": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_bits_of_a_cpu(case, program, on_device=({}, graphs), **SPIKES)
