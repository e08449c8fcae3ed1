"""A step captured once and replayed: bit-equal to ordinary steps, with values that stay live between replays.

The fake accelerator records what is queued during a capture and queues it again at each replay. A host read, an upload
or a wait for an event is an error during a capture, and so is memory that was given back by the time of a replay.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fake_accelerator import DeferredRank, run_deferred
from graph_training import (
    ALONE,
    BAD_STEPS,
    FLAT,
    STEPS,
    built_with_graphs,
    iterate,
    schedule,
    train,
    train_with_graphs,
    watched,
)
from on_device import NUM_ORDERS, SHAPES, SIZE, Trained, built, equal, launched, layouts, outcome, sweep_stats
from parity import Case, Numbers, Spread, Wrapping, grads_of
from queued_kernels import queue_kernels
from torch import nn

from opt_distributed import run_threads
from opt_distributed.comm import Comm
from opt_distributed.step import stats
from opt_stack import Optimizer

pytestmark = pytest.mark.usefixtures(launched.__name__)


def cases() -> Iterator[Case]:
    yield from layouts()
    for rule in ("sgd", "lion", "adaptive_muon"):
        yield Case(
            size=1, spread=Spread.REPLICATED, numbers=Numbers.FP16, rule=rule, clips=True, wrapping=Wrapping.PLAIN
        )


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_replays_give_the_bits_of_steps_in_every_order(case: Case) -> None:
    """Two of the steps overflow, one of them in a replay; learning rates, decays and betas change all the time."""
    expected = run_threads(case.size, lambda comm: train(case, comm, schedule))
    assert [result[0] for result in expected[0].results] == [step not in BAD_STEPS for step in range(STEPS)]
    for seed in range(NUM_ORDERS):
        trained = run_deferred(case.size, partial(train_with_graphs, case), seed=seed)
        for (found, did), of_rank in zip(trained, expected, strict=True):
            assert did == ["", "capture replay", *["replay"] * (STEPS - 2)]
            assert equal(found, of_rank), f"seed {seed}"


def changes(optimizer: Optimizer, model: nn.Module, change: str) -> None:
    """Something that a capture freezes changes."""
    match change:
        case "a number that chooses":
            optimizer.param_groups[0]["momentum"] = 0.0
        case "a loaded state":
            saved = optimizer.state_dict()
            for state in saved["state"].values():
                state["step"] = state["step"] + 3
            saved["grad_scaler"] = saved["grad_scaler"] | {"scale": 64.0}
            optimizer.load_state_dict(saved)
        case "memory that moves":
            for _, piece in optimizer._held.values():
                assert piece.step == 2  # the host waits for what is queued
                for state in piece.state.values():
                    state.data = state.data.clone()
        case "limits":
            optimizer.stepper.limits = replace(optimizer.stepper.limits, max_norm=0.5)
        case "a group's other entry":
            optimizer.param_groups[0]["betas"] = (0.8, 0.9)  # numbers: nothing is captured again
        case _:
            raise AssertionError(change)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ("a number that chooses", "sgd"),
        ("a loaded state", "adam"),
        ("memory that moves", "adam"),
        ("limits", "adam"),
        ("a group's other entry", "adam"),
    ],
)
def test_what_a_capture_freezes_is_captured_again(change: str, rule: str) -> None:
    case = replace(ALONE, rule=rule)

    def between(step: int, model: nn.Module, optimizer: Optimizer) -> None:
        if step == 3:
            changes(optimizer, model, change)

    def on_device(one: DeferredRank) -> tuple[Trained, list[str]]:
        model, optimizer = built_with_graphs(case, one)
        did, results = watched(optimizer), []
        for step in range(STEPS):
            between(step, model, optimizer)
            did.append("")
            results.append(iterate(step, model, optimizer, one.comm))
        return outcome(model, optimizer, results), did

    (expected,) = run_threads(1, lambda comm: train(case, comm, between))
    again = ["replay", "replay"] if change == "a group's other entry" else ["", "capture replay"]
    for seed in range(3):
        ((found, did),) = run_deferred(1, on_device, seed=seed)
        assert did == ["", "capture replay", "replay", *again, "replay"]
        assert equal(found, expected)


def test_the_halves_of_a_step_run_between_replays() -> None:
    """They are never captured, because the host reads the gradients in between."""

    def halves(step: int, model: nn.Module, optimizer: Optimizer, comm: Comm) -> Any:
        if step != 3:
            return iterate(step, model, optimizer, comm)
        optimizer.scale_loss(model(grads_of(step, comm.rank, comm.size, SHAPES))).backward()
        assert not optimizer.prepare_grads()
        norm = optimizer.clip_grad_norm(0.25)
        success = optimizer.step_with_ready_grads()
        optimizer.zero_grad()
        return success, norm, 0

    def on_device(one: DeferredRank) -> Trained:
        model, optimizer = built_with_graphs(FLAT, one)
        return outcome(model, optimizer, [halves(step, model, optimizer, one.comm) for step in range(STEPS)])

    def on_host(comm: Comm) -> Trained:
        model, optimizer = built(FLAT, comm)
        return outcome(model, optimizer, [halves(step, model, optimizer, comm) for step in range(STEPS)])

    expected = run_threads(SIZE, on_host)
    for seed in range(3):
        assert all(map(equal, run_deferred(SIZE, on_device, seed=seed), expected))


FORMATS: list[tuple[Numbers, dict[str, Any]]] = [
    *((numbers, {}) for numbers in Numbers),
    (Numbers.BF16, {"use_precision_aware_optimizer": True, "main_params_dtype": torch.int8}),
]


@pytest.mark.parametrize("rule", ["adam", "muon"])
@pytest.mark.parametrize(("numbers", "fields"), FORMATS, ids=[*(numbers.value for numbers in Numbers), "24-bit mains"])
def test_the_host_code_of_triton_kernels_can_be_captured(
    rule: str, numbers: Numbers, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under Triton's interpreter, whose kernels are queued; their tables hold real addresses."""
    queue_kernels(monkeypatch)
    monkeypatch.setattr(stats, "grad_stats", partial(sweep_stats, backend="triton"))
    case = replace(ALONE, numbers=numbers, rule=rule, spread=Spread.WHOLE if rule == "muon" else Spread.REPLICATED)

    def with_triton(optimizer: Optimizer) -> None:
        for unit in optimizer.stepper.units:
            unit.rule = replace(unit.rule, backend="triton")

    def build(case: Case, one: DeferredRank) -> tuple[nn.Module, Optimizer]:
        model, optimizer = built(case, one.comm, optimizer_cuda_graph=True, **fields)
        with_triton(optimizer)
        return model, optimizer

    def on_host(comm: Comm) -> Trained:
        model, optimizer = built(case, comm, **fields)
        with_triton(optimizer)
        results = []
        for step in range(STEPS):
            schedule(step, model, optimizer)
            results.append(iterate(step, model, optimizer, comm))
        return outcome(model, optimizer, results)

    (expected,) = run_threads(1, on_host)
    ((found, did),) = run_deferred(1, partial(train_with_graphs, case, build=build), seed=0, eagerness=1.0)
    assert did == ["", "capture replay", *["replay"] * (STEPS - 2)]
    assert equal(found, expected)
