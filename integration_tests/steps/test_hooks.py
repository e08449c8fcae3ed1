"""Hooks around the update on several ranks: the weights of one process, one collective a step, and what is refused."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from parity import SHAPES, Case, Net, Numbers, Spread, Wrapping, grads_of, norms_while_training, roles_over
from recording_comm import RecordingComm
from torch import Tensor

from opt_checkpoint import load, save, sharded_model
from opt_config import ConfigError, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_kernels.hooks import (
    CautiousDecay,
    CautiousUpdate,
    CentralizeGradient,
    ClipUpdateRms,
    CoupledDecay,
    GivenHooks,
    Hyperball,
    LrDecoupledDecay,
    RelativeUpdate,
    RowFloor,
)
from opt_stack import get_optimizer

FLAT: dict[str, Any] = {
    "elementwise": (CautiousDecay(),),
    "l2": (CoupledDecay(),),
    "lr-decoupled": (LrDecoupledDecay(0.05),),
    "clip": (ClipUpdateRms(0.05),),
    "relative": (RelativeUpdate(), CautiousDecay()),
    "mask": (CautiousUpdate(), CoupledDecay(), ClipUpdateRms(0.05)),
    "centralized": (CentralizeGradient(), CoupledDecay()),
    "centralized, relative": (CentralizeGradient(), RelativeUpdate()),
}
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


class Trained(NamedTuple):
    weights: dict[str, Tensor]
    norms: list[float]


def train(case: Case, hooks: GivenHooks = (), **changes: Any) -> list[Trained]:
    """Every rank's weights and norms after three steps; `changes` are of the configuration."""
    config = replace(case.config, **changes)

    def rank_main(comm: Comm) -> Trained:
        net, roles = Net(case.numbers.dtype), roles_over(comm)
        model: torch.nn.Module = net
        if case.wrapping is not Wrapping.PLAIN:
            model = DistributedDataParallel(case.ddp_config, net, groups=roles, optimizer_config=config)
        optimizer = get_optimizer(config, [model], {}, pg_collection=roles, hooks=hooks)
        norms = norms_while_training(model, optimizer, range(3), comm, SHAPES)
        return Trained({name: p.detach().clone() for name, p in net.named_parameters()}, norms)

    return run_threads(case.size, rank_main)


def dtypes(case: Case) -> dict[str, torch.dtype]:
    return {f"{name}.weight": torch.float32 if name == "router" else case.numbers.dtype for name in SHAPES}


def case(rule: str, size: int, spread: Spread, numbers: Numbers, wrapping: Wrapping) -> Case:
    return Case(size=size, spread=spread, numbers=numbers, rule=rule, clips=True, wrapping=wrapping)


CASES = [
    case("adam", 3, Spread.FLAT, Numbers.FP32, Wrapping.PLAIN),
    case("adam", 2, Spread.FLAT, Numbers.REMAINDER, Wrapping.OVERLAP),
    case("lion", 2, Spread.FLAT, Numbers.FP16, Wrapping.WRAPPED),
    case("sgd", 2, Spread.REPLICATED, Numbers.BF16, Wrapping.PLAIN),
]


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_rank_has_the_weights_of_one_process(case: Case, name: str) -> None:
    (want,), by_rank = train(case.alone, FLAT[name]), train(case, FLAT[name])
    for got in by_rank:
        for weight, dtype in dtypes(case).items():
            rtol = 2e-5 + ROUNDING[dtype]
            torch.testing.assert_close(got.weights[weight], want.weights[weight], rtol=rtol, atol=2e-5)
        for one, other in zip(got.weights.values(), by_rank[0].weights.values()):
            assert torch.equal(one, other)


@pytest.mark.parametrize("size", [2, 3])
def test_muon_on_a_hyperball_deals_whole_matrices(size: int) -> None:
    hooks = {"muon": (Hyperball(), CentralizeGradient()), "adam": (ClipUpdateRms(0.05),)}
    of_ranks = case("muon", size, Spread.WHOLE, Numbers.REMAINDER, Wrapping.PLAIN)
    (want,) = train(of_ranks.alone, hooks, weight_decay=0.0)
    for got in train(of_ranks, hooks, weight_decay=0.0):
        for name, dtype in dtypes(of_ranks).items():
            torch.testing.assert_close(got.weights[name], want.weights[name], rtol=2e-5 + ROUNDING[dtype], atol=2e-5)
    start = dict(Net(torch.bfloat16).named_parameters())
    for name in ("first.weight", "second.weight", "qkv.weight"):
        norm = start[name].detach().float().norm()
        assert torch.isclose(want.weights[name].float().norm(), norm, rtol=1e-3)  # of bfloat16 weights
        assert not torch.equal(want.weights[name], start[name])


def config(**changes: Any) -> OptimizerConfig:
    return OptimizerConfig(lr=0.02, weight_decay=0.1, **changes)


def collectives(hooks: Any, **changes: Any) -> list[str]:
    """The collectives of rank 0 of two in its second step."""

    def rank_main(comm: Comm) -> list[str]:
        recording = RecordingComm(comm)
        axes = Axes(dp=recording, tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=recording)
        model = Net(torch.float32)
        optimizer = get_optimizer(config(**changes), [model], {}, pg_collection=roles, hooks=hooks)
        for step in range(2):
            recording.calls.clear()
            model(grads_of(step, comm.rank, comm.size)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [call.kind for call in recording.calls]

    return run_threads(2, rank_main)[0]


NORMS, CENTERS = (ClipUpdateRms(), RelativeUpdate()), (CentralizeGradient(),)
FLAT_STATE = {"use_distributed_optimizer": True}
LAYER_WISE = {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True}


@pytest.mark.parametrize(
    ("hooks", "fields", "more"),
    [
        (NORMS, FLAT_STATE, 1),
        ((CautiousDecay(),), FLAT_STATE, 0),
        (NORMS, {}, 0),  # replicas hold whole parameters
        (NORMS, LAYER_WISE, 1),  # of Adam's parameters
        (CENTERS, FLAT_STATE, 1),
        ((*CENTERS, ClipUpdateRms()), FLAT_STATE, 2),
        (CENTERS, {}, 0),
    ],
)
def test_norms_and_row_means_take_one_collective_a_step_where_parameters_are_cut(
    hooks: Any, fields: dict[str, Any], more: int
) -> None:
    expected = [*collectives((), **fields), *["all_reduce"] * more]
    assert sorted(collectives(hooks, **fields)) == sorted(expected)


class Part(torch.nn.Module):
    """The rows or columns of one tensor-parallel rank of a matrix, or the whole."""

    def __init__(
        self, grad: torch.Tensor, *, is_part: bool, partition_dim: int | None = 0, start: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros_like(grad) if start is None else start.clone())
        self.weight.grad = grad.clone()
        if is_part:
            self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            self.weight.partition_dim = partition_dim  # type: ignore[attr-defined]


def test_a_floor_of_rows_is_that_of_the_weights_on_every_rank() -> None:
    """Rank 0 holds rows whose update is small compared with their weights."""
    generator = torch.Generator().manual_seed(0)
    grad, start = (torch.randn(8, 6, generator=generator).sign() for _ in range(2))
    grad[:4] *= 0.01
    settings = OptimizerConfig(optimizer="sgd", lr=1.0, weight_decay=0.0, clip_grad=0.0, sgd_momentum=0.0)

    def moved(comm: Comm) -> torch.Tensor:
        axes = Axes(dp=Alone(), tp=comm)
        part = (whole.chunk(comm.size)[comm.rank] for whole in (grad, start))
        model = Part(next(part), is_part=comm.size > 1, start=next(part))
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        get_optimizer(settings, [model], {}, pg_collection=roles, hooks=(RowFloor(0.5),)).step()
        return model.weight.detach()

    (alone,), parts = run_threads(1, moved), run_threads(2, moved)
    assert torch.allclose(alone, start - torch.cat([grad[:4] * 50, grad[4:]]), rtol=1e-5)
    assert torch.allclose(torch.cat(parts), alone, rtol=1e-6)


PLAIN_SGD = OptimizerConfig(optimizer="sgd", lr=1.0, weight_decay=0.0, clip_grad=0.0, sgd_momentum=0.0)


def moved_centered(grad: torch.Tensor, dim: int | None, comm: Comm, *, is_flat: bool) -> torch.Tensor:
    """Minus the gradient of a rank's part, without row means; `is_flat`: ranks are replicas that own flat shards."""
    axes = Axes(dp=comm, tp=Alone()) if is_flat else Axes(dp=Alone(), tp=comm)
    part = grad if is_flat else grad.tensor_split(comm.size, dim or 0)[comm.rank]
    model = Part(part, is_part=comm.size > 1 and not is_flat, partition_dim=dim)
    roles = Roles(dense=axes, expert=axes, everyone=comm)
    settings = replace(PLAIN_SGD, use_distributed_optimizer=is_flat)
    get_optimizer(settings, [model], {}, pg_collection=roles, hooks=(CentralizeGradient(),)).step()
    return model.weight.detach()


@pytest.mark.parametrize("shape", [(5, 701), (3, 2, 1, 501), (1, 2003), (1301, 1), (1, 3)], ids=str)
def test_rows_that_flat_shards_cut_lose_their_whole_mean(shape: tuple[int, ...]) -> None:
    """A mean of float64 sums, rounded once, where one process takes it in float32."""
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    (alone,) = run_threads(1, lambda comm: moved_centered(grad, 0, comm, is_flat=True))
    for moved in run_threads(4, lambda comm: moved_centered(grad, 0, comm, is_flat=True)):
        torch.testing.assert_close(moved, alone, rtol=0.0, atol=2.0**-22)
    want = grad.mean(tuple(range(1, grad.dim())), keepdim=True) - grad
    torch.testing.assert_close(alone, want, rtol=0.0, atol=2.0**-22)


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_that_tensor_parallelism_cuts_lose_their_whole_mean(dim: int) -> None:
    """Columns are cut in equal parts. Ranks that hold different rows must not be summed."""
    grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    parts = run_threads(2, lambda comm: moved_centered(grad, dim, comm, is_flat=False))
    want = grad.mean(1, keepdim=True) - grad
    torch.testing.assert_close(torch.cat(parts, dim), want, rtol=0.0, atol=2.0**-22)


def build(
    comm: Comm, hooks: Any, *, model: torch.nn.Module | None = None, like: OptimizerConfig | None = None, **changes: Any
) -> Any:
    settings = replace(like or config(), **changes)
    return get_optimizer(settings, [model or Net(torch.float32)], {}, pg_collection=roles_over(comm), hooks=hooks)


def zeros_on_a_sphere(radius: float | None) -> Any:
    model = Net(torch.float32, {"first": (4, 4), "embedding": (4, 4), "qkv": (12, 4)})
    with torch.no_grad():
        model.qkv.weight.zero_()
    return build(Alone(), {"muon": (Hyperball(radius=radius),)}, model=model, optimizer="muon", weight_decay=0.0)


UNKNOWN_DIM = "tensor parallelism cuts it along an unknown dim; set its partition_dim"
SHARDED_ROWS = {"like": PLAIN_SGD, "use_distributed_optimizer": True}
REFUSED: dict[str, tuple[Callable[[Comm], object], tuple[str, ...]]] = {
    "an unused rule": (
        lambda comm: build(comm, {"muon": (CautiousDecay(),)}),
        ("hooks has 'muon', but parameters are updated by adam",),
    ),
    "a vector on a sphere": (
        lambda comm: build(comm, (Hyperball(),), weight_decay=0.0),
        ("'bias.weight': its shape is (7,), and it is for matrices",),
    ),
    "decay on a sphere": (
        lambda comm: build(comm, {"muon": (Hyperball(),)}, optimizer="muon"),
        ("weight_decay=0.1, but Hyperball() fixes",),
    ),
    "not a hook": (lambda comm: build(comm, ("cautious",)), ("which is not a hook",)),
    "rows cut in an unknown dim": (
        lambda comm: moved_centered(torch.ones(4, 4), None, comm, is_flat=False),
        (UNKNOWN_DIM,),
    ),
    "floors of rows that span ranks": (
        lambda comm: build(comm, (RowFloor(0.5),), model=torch.nn.Linear(4, 4, bias=False), **SHARDED_ROWS),
        ("the hook needs whole rows, which this layout cuts over ranks",),
    ),
    "zeros on a sphere": (lambda comm: zeros_on_a_sphere(None), ("'qkv.weight' is all zeros; use Hyperball",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank(name: str) -> None:
    attempt, words = REFUSED[name]

    def rank_main(comm: Comm) -> str:
        with pytest.raises(ConfigError) as caught:
            attempt(comm)
        return str(caught.value)

    for message in run_threads(2, rank_main):
        assert all(text in message for text in words)


def test_zeros_may_lie_on_a_sphere_of_a_given_radius() -> None:
    zeros_on_a_sphere(1.0)


def trained(hooks: Any) -> tuple[Net, Any]:
    model = Net(torch.float32)
    optimizer = get_optimizer(config(), [model], {}, hooks=hooks)
    model(grads_of(0, 0, 1)).backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("sharded", [False, True], ids=["state_dict", "sharded"])
def test_other_hooks_at_resume_are_named(sharded: bool, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    hooks = (CautiousDecay(), ClipUpdateRms(0.5))
    model, optimizer = trained(hooks)
    weights = sharded_model(model)
    save({"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}, str(tmp_path / "saved"))
    for now, listed in ((hooks, "none"), ((CautiousDecay(),), "CautiousDecay()"), ((), "none")):
        other_model, other = trained(now)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="opt_stack"):
            if sharded:
                weights = sharded_model(other_model)
                state = {"model": weights, "optimizer": other.sharded_state_dict(weights)}
                other.load_state_dict(load(state, str(tmp_path / "saved")).state["optimizer"])
            else:
                other.load_state_dict(optimizer.state_dict())
        saved_with = "but was saved with CautiousDecay(), ClipUpdateRms(threshold=0.5)"
        assert (f"continues with hooks {listed}, {saved_with}" in caplog.text) is (now != hooks)
        assert ("continues with" in caplog.text) is (now != hooks)
        assert all(group.get("hooks", ()) == tuple(map(repr, now)) for group in other.param_groups)
