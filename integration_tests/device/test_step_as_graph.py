"""A step captured once and replayed: bit-equal to ordinary steps, with values that stay live between replays.

The fake accelerator records what is queued during a capture and queues it again at each replay. A host read, an upload
or a wait for an event is an error during a capture, and so is memory that was given back by the time of a replay.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import on_device
import pytest
import torch
from fake_accelerator import DeferredRank, run_deferred
from on_device import BAD_STEP, FLAT, Program, Trained, assert_bits_of_a_cpu, iterate, launched, outcome, schedule
from parity import Case, Numbers, Spread, roles_over
from tiers import in_turn
from torch import nn

from opt_config import ConfigError, OptimizerConfig
from opt_distributed.buffers import UnusableGradientError
from opt_distributed.comm import Comm
from opt_distributed.comm.device import Graph
from opt_distributed.step import capture, verdict
from opt_kernels.hooks import RelativeUpdate
from opt_stack import Optimizer, get_optimizer

pytestmark = pytest.mark.usefixtures(launched.__name__)

STEPS = 6
ALONE = replace(FLAT, size=1, spread=Spread.REPLICATED)
BAD_STEPS = (BAD_STEP, 4)  # while steps run as they are, and in a replay
REPLAYS = ("", "capture replay", *["replay"] * (STEPS - 2))
GRAPHS = ({"optimizer_cuda_graph": True},)
Between = Callable[[int, Optimizer], None]


class Watched:
    """A graph that records its captures and replays in the last entry."""

    def __init__(self, graph: Graph, did: list[str]):
        self._graph = graph
        self._did = did

    def capture(self) -> Any:
        self._did[-1] += "capture "
        return self._graph.capture()

    def replay(self) -> None:
        self._did[-1] += "replay"
        self._graph.replay()


def train(between: Between = schedule, *, do: Sequence[str] = REPLAYS, may_read: bool = False) -> Program:
    """Two of the steps overflow, one of them in a replay. With graphs, steps do what `do` says."""

    def program(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
        did = []
        results = []
        captured = optimizer.stepper._captured
        if captured is not None:
            captured._graph = Watched(captured._graph, did)
        for step in range(len(do)):
            between(step, optimizer)
            did.append("")
            results.append(iterate(model, optimizer, step, comm, bad_steps=BAD_STEPS, may_read=may_read))
        assert captured is None or did == [*do]
        found = outcome(model, optimizer, results)
        assert [result[0] for result in found.results] == [step not in BAD_STEPS for step in range(len(do))]
        return found

    return program


def cases() -> Iterator[Case]:
    yield from on_device.layouts()
    yield from (replace(ALONE, rule=rule) for rule in ("sgd", "lion", "adaptive_muon"))


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_replays_give_the_bits_of_steps_in_every_order(case: Case) -> None:
    """Learning rates, decays and betas change all the time."""
    assert_bits_of_a_cpu(case, train(), on_device=GRAPHS)


def load(optimizer: Optimizer) -> None:
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["step"] = state["step"] + 3
    saved["grad_scaler"] = saved["grad_scaler"] | {"scale": 64.0}
    optimizer.load_state_dict(saved)


def move(optimizer: Optimizer) -> None:
    for _, piece in optimizer._held.values():
        assert piece.step == 2  # the host waits for what is queued
        for state in piece.state.values():
            state.data = state.data.clone()


def limit(optimizer: Optimizer) -> None:
    optimizer.stepper.limits = replace(optimizer.stepper.limits, max_norm=0.5)


# What changes before the fourth step, with which rule, and whether the step is captured again.
CHANGES: dict[str, tuple[Callable[[Optimizer], None], str, bool]] = {
    "a number that chooses": (lambda optimizer: optimizer.param_groups[0].update(momentum=0.0), "sgd", True),
    "a loaded state": (load, "adam", True),
    "memory that moves": (move, "adam", True),
    "limits": (limit, "adam", True),
    "other numbers": (lambda optimizer: optimizer.param_groups[0].update(betas=(0.8, 0.9)), "adam", False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_capture_freezes_is_captured_again(change: str) -> None:
    apply, rule, is_frozen = CHANGES[change]
    again = ["", "capture replay"] if is_frozen else ["replay", "replay"]
    between = lambda step, optimizer: apply(optimizer) if step == 3 else None
    program = train(between, do=[*REPLAYS[:3], *again, "replay"], may_read=True)
    assert_bits_of_a_cpu(replace(ALONE, rule=rule), program, on_device=GRAPHS)


def test_a_step_that_cannot_be_replayed_for_long_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Limits that change before every step: none is captured, nor replayed from before a change and back."""
    num_steps = capture.MANY_MISSES + 2

    def between(step: int, optimizer: Optimizer) -> None:
        optimizer.stepper.limits = replace(optimizer.stepper.limits, max_norm=(0.5, 0.25)[step % 2])

    assert_bits_of_a_cpu(ALONE, train(between, do=[""] * num_steps), on_device=GRAPHS, num_orders=1)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "opt_distributed.step.capture"]
    assert f"the last {capture.MANY_MISSES} steps ran without their graph" in warning


def halves(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
    """The fourth step in halves, which are never captured, because the host reads the gradients in between."""
    results: list[Any] = []
    for step in range(STEPS):
        if step != 3:
            results.append(iterate(model, optimizer, step, comm, bad_steps=BAD_STEPS))
            continue
        on_device.backward(model, optimizer, step, comm)
        assert not optimizer.prepare_grads()
        norm = optimizer.clip_grad_norm(0.25)
        results.append((optimizer.step_with_ready_grads(), norm, 0))
        optimizer.zero_grad()
    return outcome(model, optimizer, results)


def test_the_halves_of_a_step_run_between_replays() -> None:
    assert_bits_of_a_cpu(FLAT, halves, on_device=GRAPHS)


def test_a_gradient_that_is_lacking_before_a_replay_is_refused() -> None:
    """Without the refusal, the step leaves its parameter out."""

    def rank_main(one: DeferredRank) -> None:
        model, optimizer = on_device.built(ALONE, one.comm, optimizer_cuda_graph=True)
        on_device.launch_rules_(optimizer)
        for step in range(3):
            iterate(model, optimizer, step, one.comm)
        on_device.backward(model, optimizer, 3, one.comm)
        model.first.weight.grad = None
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(UnusableGradientError, match=r"'first\.weight' has no gradient: a step as a graph"):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))

    run_deferred(1, rank_main, seed=0)


MAINS_IN_24_BITS = {"use_precision_aware_optimizer": True, "main_params_dtype": torch.int8}
FORMATS = {numbers.value: (numbers, {}) for numbers in Numbers} | {"24-bit mains": (Numbers.BF16, MAINS_IN_24_BITS)}


@pytest.mark.parametrize(("name", "rule"), in_turn(FORMATS, ["adam", "muon"]))
def test_the_host_code_of_triton_kernels_can_be_captured(rule: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Triton's interpreter, whose kernels are queued; their tables hold real addresses."""
    on_device.queue_triton_kernels(monkeypatch)
    monkeypatch.setattr(verdict, "grad_stats", partial(on_device.sweep_stats, backend="triton"))
    numbers, fields = FORMATS[name]
    case = replace(ALONE, numbers=numbers, rule=rule, spread=Spread.WHOLE if rule == "muon" else Spread.REPLICATED)

    def by_triton(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
        for unit in optimizer.stepper.units:
            unit.rule = replace(unit.rule, backend="triton")
        return train()(model, optimizer, comm)

    assert_bits_of_a_cpu(
        case, by_triton, on_device=GRAPHS, num_orders=1, prepare=lambda optimizer: None, eagerness=1.0, **fields
    )


# Fields, and the message.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a rule that reads": ({"optimizer": "soap"}, "with optimizer='soap': its update reads values on the host"),
    "hooks with memory": ({"hooks": (RelativeUpdate(),)}, "of 'adam', which allocate memory in every step; use hooks"),
    "fp16 main values": (
        {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.float16},
        "whose values are decoded to new memory at every step",
    ),
    "parameters in fp8": (
        {"bf16": True, "fp8_recipe": "delayed"},
        "fp8_recipe='delayed': excludes optimizer_cuda_graph: scales are exchanged between update and gather",
    ),
    "state on the host": (
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0},
        "optimizer_cpu_offload=True: excludes optimizer_cuda_graph",
    ),
    "gathers within the step": (
        {
            "use_distributed_optimizer": True,
            "overlap_param_gather": True,
            "overlap_param_gather_with_optimizer_step": True,
        },
        "excludes optimizer_cuda_graph: a captured step is a single call",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_refused(name: str) -> None:
    fields, message = REFUSED[name]
    hooks = fields.get("hooks", ())
    options = {key: value for key, value in fields.items() if key != "hooks"}

    def rank_main(one: DeferredRank) -> None:
        config = OptimizerConfig(lr=0.1, optimizer_cuda_graph=True, **options)
        model = nn.Linear(4, 4, bias=False).to(torch.bfloat16 if config.bf16 else torch.float32)
        get_optimizer(config, [model], {}, pg_collection=roles_over(one.comm), hooks=hooks)

    with pytest.raises(ConfigError, match=re.escape(message)):
        run_deferred(1, rank_main, seed=0)


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(ConfigError, match="optimizer_cuda_graph=True with device 'cpu': only cuda devices have"):
        get_optimizer(OptimizerConfig(lr=0.1, optimizer_cuda_graph=True), [nn.Linear(2, 2)])
