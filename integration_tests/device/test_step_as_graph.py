"""A step captured once and replayed: bit-equal to ordinary steps, with values that stay live between replays.

The fake accelerator records what is queued during a capture and queues it again at each replay. A host read, an upload
or a wait for an event is an error during a capture, and so is memory that was given back by the time of a replay.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fake_accelerator import DeferredRank, run_deferred
from on_device import (
    BAD_STEP,
    NUM_ORDERS,
    SHAPES,
    SIZE,
    Trained,
    built,
    equal,
    launch_rules_,
    launched,
    layouts,
    outcome,
    sweep_stats,
)
from on_device import iterate as iterate_one
from parity import Case, Numbers, Spread, Wrapping, grads_of, roles_over
from queued_kernels import queue_kernels
from torch import nn

from opt_config import ConfigError, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import UnusableGradientError
from opt_distributed.comm import Comm
from opt_distributed.comm.device import Graph
from opt_distributed.step import verdict
from opt_kernels.hooks import RelativeUpdate
from opt_stack import Optimizer, get_optimizer

pytestmark = pytest.mark.usefixtures(launched.__name__)

STEPS = 6
FLAT = Case(size=SIZE, spread=Spread.FLAT, numbers=Numbers.FP16, rule="adam", clips=True, wrapping=Wrapping.PLAIN)
ALONE = replace(FLAT, size=1, spread=Spread.REPLICATED)
BAD_STEPS = (BAD_STEP, 4)  # while steps run as they are, and in a replay
Between = Callable[[int, nn.Module, Optimizer], None]


def schedule(step: int, model: nn.Module, optimizer: Optimizer) -> None:
    """All numbers of all groups change at every step."""
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.02 / (1 + step + number)
        group["weight_decay"] = 0.01 * step
        if "betas" in group:
            group["betas"] = (0.9 - 0.01 * step, 0.99 - 0.01 * step)
        if "momentum" in group:
            group["momentum"] = 0.9 - 0.05 * step


def iterate(step: int, model: nn.Module, optimizer: Optimizer, comm: Comm) -> Any:
    return iterate_one(model, optimizer, step, comm, bad_steps=BAD_STEPS)


def train(case: Case, comm: Comm, between: Between) -> Trained:
    model, optimizer = built(case, comm)
    results = []
    for step in range(STEPS):
        between(step, model, optimizer)
        results.append(iterate(step, model, optimizer, comm))
    return outcome(model, optimizer, results)


def built_with_graphs(case: Case, one: DeferredRank) -> tuple[nn.Module, Optimizer]:
    model, optimizer = built(case, one.comm, optimizer_cuda_graph=True)
    launch_rules_(optimizer)
    return model, optimizer


def train_with_graphs(
    case: Case, one: DeferredRank, between: Between = schedule, build: Any = built_with_graphs
) -> tuple[Trained, list[str]]:
    """Also what each step did: replay, capture, or neither."""
    model, optimizer = build(case, one)
    did = watched(optimizer)
    results = []
    with one.device.host_reads_forbidden():
        for step in range(STEPS):
            between(step, model, optimizer)
            did.append("")
            results.append(iterate(step, model, optimizer, one.comm))
    return outcome(model, optimizer, results), did


def watched(optimizer: Optimizer) -> list[str]:
    """What is done with the graph from now on, in the last entry."""
    did: list[str] = []
    step = optimizer.stepper._captured
    assert step is not None
    step._work._graph = Watched(step._work._graph, did)
    return did


class Watched:
    """A graph that records its captures and replays."""

    def __init__(self, graph: Graph, did: list[str]):
        self._graph, self._did = graph, did

    def capture(self) -> Any:
        self._did[-1] += "capture "
        return self._graph.capture()

    def replay(self) -> None:
        self._did[-1] += "replay"
        self._graph.replay()


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
    monkeypatch.setattr(verdict, "grad_stats", partial(sweep_stats, backend="triton"))
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


# --- refusals ---------------------------------------------------------------------------------------------------------


def objecting(one: DeferredRank, *, object_: Any) -> list[tuple[str, str, bool]]:
    """Of a replay to which rank 1 objects, and of the step after it: the error of the step, that of its result, and
    whether any weight moved."""
    model, optimizer = built_with_graphs(replace(FLAT, numbers=Numbers.FP32), one)
    found = []
    for step in (0, 2, 3, 5, 6):
        before = [param.detach().clone() for param in model.parameters()]
        grads = grads_of(step, one.rank, SIZE, SHAPES)
        optimizer.scale_loss(model(grads)).backward()
        undo = object_(model, optimizer) if step == 5 and one.rank == 1 else None
        of_step = of_result = ""
        try:
            result = optimizer.step()
        except (ValueError, UnusableGradientError) as error:
            of_step = type(error).__name__
        else:
            try:
                result.success  # noqa: B018  # read, which raises
            except (ValueError, UnusableGradientError) as error:
                of_result = type(error).__name__
        if undo is not None:
            undo()
        optimizer.zero_grad()
        found.append((of_step, of_result, not all(map(torch.equal, before, model.parameters()))))
    return found[-2:]


def other_lr(model: nn.Module, optimizer: Optimizer) -> Any:
    group = optimizer.param_groups[0]
    lr, group["lr"] = group["lr"], 1.0

    def undo() -> None:
        group["lr"] = lr

    return undo


def moved(model: nn.Module, optimizer: Optimizer) -> Any:
    data = model.first.weight.data
    model.first.weight.data = data.clone()

    def undo() -> None:
        model.first.weight.data = data

    return undo


def no_gradient(model: nn.Module, optimizer: Optimizer) -> Any:
    model.router.weight.grad = None


@pytest.mark.parametrize(
    ("object_", "error"), [(other_lr, "HyperError"), (moved, "StorageError"), (no_gradient, "UnusableGradientError")]
)
def test_an_objection_to_a_replay_stops_it_on_every_rank(object_: Any, error: str) -> None:
    """The next step continues, as a replay if nothing that the capture froze has changed."""
    for seed in range(3):
        first, second = run_deferred(SIZE, partial(objecting, object_=object_), seed=seed)
        assert first == [("", error, False), ("", "", True)]
        assert second == first


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a rule that reads": (
        {"optimizer": "soap"},
        "optimizer_cuda_graph=True with optimizer='soap': its update reads values on the host, or the rule does "
        "not declare capturable=True; use another rule, or set it to False",
    ),
    "hooks with memory of their own": (
        {"hooks": (RelativeUpdate(),)},
        "optimizer_cuda_graph=True with hooks (RelativeUpdate(),) of 'adam', which allocate memory in every "
        "step; use hooks that are part of a formula (CautiousDecay, CoupledDecay or LrDecoupledDecay of an "
        "elementwise rule), or set it to False",
    ),
    "fp16 main values": (
        {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.float16},
        "optimizer_cuda_graph=True with main_params_dtype=torch.float16, whose values are decoded to new memory at "
        "every step; use remainders or fp32 main values, or set it to False",
    ),
    "parameters in fp8": (
        {"bf16": True, "fp8_recipe": "delayed"},
        "OptimizerConfig: fp8_recipe='delayed': excludes optimizer_cuda_graph: scales are exchanged between update "
        "and gather; set only one of them",
    ),
    "state on the host": (
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
        "OptimizerConfig: optimizer_cpu_offload=True: excludes optimizer_cuda_graph",
    ),
    "gathers within the step": (
        {
            "use_distributed_optimizer": True,
            "overlap_param_gather": True,
            "overlap_param_gather_with_optimizer_step": True,
        },
        "OptimizerConfig: overlap_param_gather_with_optimizer_step=True: excludes optimizer_cuda_graph: a captured "
        "step is a single call; set only one of them",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused(name: str) -> None:
    fields, message = REFUSED[name]

    def build(one: DeferredRank) -> None:
        options = {name: value for name, value in fields.items() if name != "hooks"}
        config = OptimizerConfig(lr=0.1, optimizer_cuda_graph=True, **options)
        model = nn.Linear(4, 4, bias=False).to(torch.bfloat16 if config.bf16 else torch.float32)
        hooks = fields.get("hooks", ())
        get_optimizer(config, [model], {}, pg_collection=roles_over(one.comm), hooks=hooks)

    def rank_main(one: DeferredRank) -> str:
        with pytest.raises(ConfigError) as caught:
            build(one)
        return str(caught.value)

    (found,) = run_deferred(1, rank_main, seed=0)
    assert found.startswith(message)


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(ConfigError) as caught:
        get_optimizer(OptimizerConfig(lr=0.1, optimizer_cuda_graph=True), [nn.Linear(2, 2)])
    message = "optimizer_cuda_graph=True: graphs on device 'cpu': only cuda devices have them; run without"
    assert str(caught.value) == message
