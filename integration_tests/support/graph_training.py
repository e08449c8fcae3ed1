"""Training of a case with steps that are captured as graphs and replayed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fake_accelerator import (
    DeferredRank,
)
from on_device import (
    BAD_STEP,
    SIZE,
    Trained,
    built,
    launch_rules_,
    outcome,
)
from on_device import iterate as iterate_once
from parity import Case, Numbers, Spread, Wrapping
from torch import nn

from opt_distributed.comm import Comm
from opt_distributed.comm.device import Graph
from opt_stack import Optimizer

STEPS = 6
FLAT = Case(size=SIZE, spread=Spread.FLAT, numbers=Numbers.FP16, rule="adam", clips=True, wrapping=Wrapping.PLAIN)
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
    return iterate_once(model, optimizer, step, comm, bad_steps=BAD_STEPS)


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


ALONE = replace(FLAT, size=1, spread=Spread.REPLICATED)
