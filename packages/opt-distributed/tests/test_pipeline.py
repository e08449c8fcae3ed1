"""Runs of matrices under way: the order of exchanges and products, in any order of the device the bits of one process.

More orders at night.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_accelerator import DeferredRank, run_deferred
from tiers import NIGHT
from torch import Tensor, nn

from opt_distributed import run_threads
from opt_distributed.comm import Comm
from opt_distributed.comm.collectives import Pending, Sizes
from opt_distributed.comm.threads import ThreadComm, World
from opt_distributed.layout import Computes, SplitMatrix, compute_layout, whole
from opt_distributed.pieces import ComputeStage, OwnedPiece, Ready, Update
from opt_distributed.pieces.exchange import updating_
from opt_distributed.step import Unit
from opt_kernels.matrices import MatmulPrecision
from opt_kernels.params import Main
from opt_kernels.rules import AdaptiveMuonRule, MatrixRule, MuonRule, Needs, SecondMoment
from opt_kernels.works import NOT_SPLIT, Batch, Hyper, MatrixPart, MatrixSpec, StateSpec, Task, Work
from opt_paramgroups import ParamId

NUM_ORDERS = 200 if NIGHT else 4
SHAPES = {ParamId(0, f"w{number}"): shape for number, shape in enumerate([(9, 8), (8, 8), (8, 12), (16, 8)] * 4)}
HYPER = Hyper(lr=0.1, weight_decay=0.01, momentum=0.9, betas=(0.9, 0.99), eps=1e-8)
STEPS = 3
MUON = MuonRule(nesterov=True)  # whose products are in bf16
RULES: dict[str, MatrixRule] = {
    "muon": MUON,
    "muon in fp32": MuonRule(fp32_matmul_prec=MatmulPrecision.HIGHEST),
    "adamuon": AdaptiveMuonRule(muon=MUON),
    "normuon": AdaptiveMuonRule(muon=MUON, second_moment=SecondMoment.NORMUON),
    "namo": AdaptiveMuonRule(muon=MUON, second_moment=SecondMoment.NAMO),
}
GRIDS = {"rows": ((2,), (0,)), "rows and columns": ((2, 2), (0, 1))}


@pytest.fixture(autouse=True)
def runs_of_one_matrix_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "LEAST_RUN_NUMEL", 0)
    monkeypatch.setattr(whole, "MANY_RUNS", 100)


def drawn(seed: int) -> dict[ParamId, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {id: torch.randn(shape, generator=generator) for id, shape in SHAPES.items()}


def alone(rule: MatrixRule) -> dict[ParamId, Tensor]:
    weights = drawn(0)
    states = {id: rule.init_state(weights[id]) for id in SHAPES}
    for step in range(STEPS):
        grads = drawn(1 + step)
        rule.update_([Batch(HYPER, [Work(grad=grads[id], main=weights[id], state=states[id]) for id in SHAPES])])
    return weights


class Parts:
    """The parts of all matrices on one rank of a grid, with their states."""

    def __init__(self, rule: MatrixRule, comms: Sequence[Comm], dims: Sequence[int]):
        matrices = [SplitMatrix(id=id, shape=shape, dims=tuple(dims)) for id, shape in SHAPES.items()]
        sizes = tuple(comm.size for comm in comms)
        layout = compute_layout(matrices, sizes=sizes, computes=Computes.OWNER)
        self.rule = rule
        self.stage = ComputeStage(layout, comms, of_whole=dict.fromkeys(SHAPES, NOT_SPLIT))
        self.weights = self.of(drawn(0))
        whole_names = {spec.name for spec in rule.state_specs if spec.whole}
        self.states = {}
        for id, part in self.weights.items():
            state = {name: x for name, x in rule.init_state(part).items() if name not in whole_names}
            if self.stage.computes(id):
                made = rule.init_state(part.new_empty(SHAPES[id]))
                state |= {name: x for name, x in made.items() if name in whole_names}
            self.states[id] = state

    def of(self, wholes: dict[ParamId, Tensor]) -> dict[ParamId, Tensor]:
        parts = {}
        for id, matrix in wholes.items():
            for dim, (start, length) in enumerate(zip(*self.stage.part(id), strict=True)):
                matrix = matrix.narrow(dim, start, length)
            parts[id] = matrix.clone()
        return parts

    def batches(self, grads: dict[ParamId, Tensor]) -> list[Batch]:
        works = []
        for id, grad in grads.items():
            spec = MatrixSpec(part=MatrixPart(id, SHAPES[id], self.stage.part(id).offset[0]))
            works.append(Work(grad=grad, main=self.weights[id], state=self.states[id], matrix=spec))
        return [Batch(HYPER, works)]

    def ready(self, grads: dict[ParamId, Tensor]) -> Ready:
        pieces = []
        for id, grad in grads.items():
            piece = OwnedPiece(
                id=id,
                param=nn.Parameter(grad),
                of_param=slice(0, grad.numel()),
                group=0,
                source=Mock(),
                main=Main(self.weights[id]),
                state=self.states[id],
                matrix=MatrixSpec(part=MatrixPart(id, SHAPES[id], self.stage.part(id).offset[0])),
            )
            pieces.append(piece)
        return Ready(pieces, list(grads.values()))

    def updating_(self, grads: dict[ParamId, Tensor], skip: Tensor | None) -> Iterator[None]:
        return updating_(self.rule, self.batches(grads), grad_scale=1.0, stages=[self.stage], skip=skip)


def comms_of(one: DeferredRank, sizes: Sequence[int]) -> list[Comm]:
    """The groups of a rank of a grid; ranks count along the last axis first."""
    ranks = torch.arange(one.size).view(tuple(sizes))
    at = [int(index) for index in (ranks == one.rank).nonzero()[0]]
    comms: list[Comm] = []
    for axis in range(len(sizes)):
        line = ranks[tuple(slice(None) if other == axis else index for other, index in enumerate(at))]
        comms.append(one.comm_over(line.tolist()))
    return comms


def whole_again(parts_of_ranks: Sequence[tuple[Parts, dict[ParamId, Tensor]]]) -> dict[ParamId, Tensor]:
    wholes = {id: torch.full(shape, torch.nan) for id, shape in SHAPES.items()}
    for parts, weights in parts_of_ranks:
        for id, weight in weights.items():
            target = wholes[id]
            for dim, (start, length) in enumerate(zip(*parts.stage.part(id), strict=True)):
                target = target.narrow(dim, start, length)
            target.copy_(weight)
    return wholes


def trained(one: DeferredRank, rule: MatrixRule, grid: str) -> tuple[Parts, dict[ParamId, Tensor]]:
    sizes, dims = GRIDS[grid]
    parts = Parts(rule, comms_of(one, sizes), dims)
    never = torch.zeros(())
    for step in range(STEPS):
        for _ in parts.updating_(parts.of(drawn(1 + step)), never):
            pass
    one.device.synchronize()
    return parts, parts.weights


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("rule", RULES)
def test_any_legal_order_gives_the_bits_of_one_process(rule: str, grid: str) -> None:
    """The side stream read gradients whose memory had been given back, and owners read matrices before they came."""
    expected = alone(RULES[rule])
    num_orders = NUM_ORDERS if rule == "muon" else NUM_ORDERS // 4
    for seed in range(num_orders):
        found = run_deferred(len(GRIDS[grid][0]) * 2, partial(trained, rule=RULES[rule], grid=grid), seed=seed)
        wholes = whole_again(found)
        assert all(torch.equal(wholes[id], expected[id]) for id in SHAPES), seed


class Cubic:
    """A rule without host reads, which can be captured: w <- w - 0.1 m mT m, with m the mean of m and g."""

    name = "cubic"
    needs = Needs.MATRICES
    state_specs = (StateSpec(name="m"),)
    codecs = MappingProxyType[str, Any]({})
    tp_mode = None

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        return {"m": torch.zeros_like(main)}

    def update_(self, batches: Sequence[Batch], **_: Any) -> None:
        assert not batches

    def prepare_(self, task: Task, grad: Tensor, skip: Tensor | None) -> None:
        grad.copy_(task.work.state["m"].lerp_(grad, 0.5))

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None) -> Tensor:
        return inputs @ inputs.mT @ inputs

    def apply_(self, task: Task, update: Tensor, skip: Tensor | None) -> None:
        assert task.work.main is not None
        task.work.main.sub_(update, alpha=0.1)


def captured(one: DeferredRank, grid: str, graphs: bool) -> list[Tensor]:
    sizes, dims = GRIDS[grid]
    parts = Parts(Cubic(), comms_of(one, sizes), dims)
    held = {id: torch.empty_like(part) for id, part in parts.weights.items()}
    graph = one.device.graph()
    for step in range(STEPS):
        for id, part in parts.of(drawn(1 + step)).items():
            held[id].copy_(part)
        if step == 1 and graphs:
            with graph.capture():
                list(parts.updating_(held, None))
        if step >= 1 and graphs:
            graph.replay()
        else:
            list(parts.updating_(held, None))
    one.device.synchronize()
    return list(parts.weights.values())


@pytest.mark.parametrize("grid", GRIDS)
def test_a_graph_replays_the_exchanges(grid: str) -> None:
    size = len(GRIDS[grid][0]) * 2
    expected = run_deferred(size, partial(captured, grid=grid, graphs=False), seed=0)
    for seed in range(NUM_ORDERS // 4):
        found = run_deferred(size, partial(captured, grid=grid, graphs=True), seed=seed)
        assert all(map(torch.equal, itertools.chain(*found), itertools.chain(*expected)))


class Noting(ThreadComm):
    """Notes the exchanges of a rank, with their dtypes."""

    def __init__(self, world: World, rank: int):
        super().__init__(world, rank)
        self.events: list[str] = []

    def all_to_all_(self, out: Tensor, x: Tensor, *, sizes: Sizes | None = None, async_op: bool = False) -> Pending:
        assert async_op
        self.events.append(str(x.dtype).removeprefix("torch."))
        return super().all_to_all_(out, x, sizes=sizes, async_op=async_op)


class NotingRule(MuonRule):
    """Notes when a matrix is orthogonalised."""

    events: list[str]
    update_dtype = MuonRule.update_dtype

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None) -> Tensor:
        self.events.append("NS")
        return super().transform_(tasks, inputs, skip)


G = "float32"
S = "bfloat16"
NS = "NS"


def test_a_gather_is_queued_before_the_products_that_hide_it() -> None:
    """Gathers carry momenta in fp32; updates return in the dtype of the products. 16 matrices in five runs."""
    world = World(2)

    def events(comm: ThreadComm) -> tuple[list[str], int]:
        noting = Noting(world, comm.rank)
        rule = NotingRule(nesterov=True)
        object.__setattr__(rule, "events", noting.events)
        parts = Parts(rule, [noting], (0,))
        updating = parts.updating_(parts.of(drawn(1)), None)
        next(updating)
        num_before = len(noting.events)
        for _ in updating:
            pass
        return [event for event, _ in itertools.groupby(noting.events[num_before:])], num_before

    assert run_threads(2, events) == [([*[NS, S, G] * 3, NS, S, NS, S], 2)] * 2


def test_a_run_from_host_memory_is_not_divided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matrices were exchanged, and stacked for the products, in smaller runs than without offload."""
    monkeypatch.setattr(whole, "MANY_RUNS", 2)
    world = World(2)

    def events(comm: ThreadComm) -> tuple[int, list[str]]:
        noting = Noting(world, comm.rank)
        parts = Parts(MUON, [noting], (0,))
        unit = Unit(name="muon", rule=MUON, pieces=[], stages=[parts.stage])
        runs = parts.stage.layout.runs(SHAPES)
        for run in runs:
            ready = parts.ready({id: grad for id, grad in parts.of(drawn(1)).items() if id in run})
            unit._update_fetched_(ready, Update(ready, [{"lr": 0.1, "weight_decay": 0.0}], [1.0]), 1.0)
        return len(runs), noting.events

    for num_runs, found in run_threads(2, events):
        assert num_runs < len(SHAPES) // 2
        assert found == [G, S] * num_runs
