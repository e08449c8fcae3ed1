"""Hooks around the update on several ranks: the weights of one process, rows that ranks cut, and what is refused."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from parity import (
    SHAPES,
    Case,
    Net,
    Numbers,
    Spread,
    Wrapping,
    norms_while_training,
    roles_over,
    sharded_state,
)
from torch import Tensor, nn

from opt_checkpoint import load, save
from opt_config import ConfigError, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_kernels import hooks
from opt_kernels.hooks import CautiousDecay, CentralizeGradient, ClipUpdateRms, GivenHooks, Hyperball, RowFloor
from opt_stack import get_optimizer

ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def train(case: Case, hooks: GivenHooks = (), **changes: Any) -> list[dict[str, Tensor]]:
    """Every rank's weights after three steps; `changes` are of the configuration."""
    config = replace(case.config, **changes)

    def rank_main(comm: Comm) -> dict[str, Tensor]:
        net = Net(case.numbers.dtype)
        roles = roles_over(comm)
        model: nn.Module = net
        if case.wrapping is not Wrapping.PLAIN:
            model = DistributedDataParallel(case.ddp_config, net, groups=roles, optimizer_config=config)
        optimizer = get_optimizer(config, [model], {}, pg_collection=roles, hooks=hooks)
        norms_while_training(model, optimizer, range(3), comm, SHAPES)
        return {name: param.detach().clone() for name, param in net.named_parameters()}

    return run_threads(case.size, rank_main)


def case(rule: str, size: int, spread: Spread, numbers: Numbers, wrapping: Wrapping = Wrapping.PLAIN) -> Case:
    return Case(size=size, spread=spread, numbers=numbers, rule=rule, clips=True, wrapping=wrapping)


CASES = [
    case("adam", 3, Spread.FLAT, Numbers.FP32),
    case("adam", 2, Spread.FLAT, Numbers.REMAINDER, Wrapping.OVERLAP),
    case("lion", 2, Spread.FLAT, Numbers.FP16, Wrapping.WRAPPED),
    case("sgd", 2, Spread.REPLICATED, Numbers.BF16),
]
ELEMENTWISE: dict[str, GivenHooks] = {
    "elementwise": (CautiousDecay(),),
    "l2": (hooks.CoupledDecay(),),
    "lr-decoupled": (hooks.LrDecoupledDecay(0.05),),
    "clip": (ClipUpdateRms(0.05),),
    "relative": (hooks.RelativeUpdate(), CautiousDecay()),
    "mask": (hooks.CautiousUpdate(), hooks.CoupledDecay(), ClipUpdateRms(0.05)),
    "centralized": (CentralizeGradient(), hooks.CoupledDecay()),
    "centralized, relative": (CentralizeGradient(), hooks.RelativeUpdate()),
}
ON_SPHERE: GivenHooks = {"muon": (Hyperball(), CentralizeGradient()), "adam": (ClipUpdateRms(0.05),)}
BRAKED: GivenHooks = {"muon": (hooks.RadialBrake(), hooks.RadiusPin())}
WHOLE = [case("muon", size, Spread.WHOLE, Numbers.REMAINDER) for size in (2, 3)]
COMPARED = {f"{name}, {case}": (case, given, {}) for name, given in ELEMENTWISE.items() for case in CASES}
COMPARED |= {str(case): (case, ON_SPHERE, {"weight_decay": 0.0}) for case in WHOLE}
COMPARED |= {f"braked, {case}": (case, BRAKED, {}) for case in WHOLE[:1]}


@pytest.mark.parametrize("name", COMPARED)
def test_every_rank_has_the_weights_of_one_process(name: str) -> None:
    case, given, changes = COMPARED[name]
    (want,) = train(case.alone, given, **changes)
    by_rank = train(case, given, **changes)
    for got in by_rank:
        for name, weight in want.items():
            rtol = 2e-5 + ROUNDING[weight.dtype]
            torch.testing.assert_close(got[name], weight, rtol=rtol, atol=2e-5)
            assert torch.equal(got[name], by_rank[0][name])


# --- rows that ranks cut ----------------------------------------------------------------------------------------------

SGD = OptimizerConfig(optimizer="sgd", lr=1.0, weight_decay=0.0, clip_grad=0.0, sgd_momentum=0.0)


def moved(
    grad: Tensor, hook: Any, comm: Comm, *, start: Tensor | None = None, dim: int | None = 0, flat: bool = False
) -> Tensor:
    """A rank's part of a weight after a step; `flat`: ranks are replicas that own flat shards, else tensor-parallel."""
    axes = Axes(dp=comm, tp=Alone()) if flat else Axes(dp=Alone(), tp=comm)
    start = torch.zeros_like(grad) if start is None else start
    if flat:
        part = start
        of_grad = grad
    else:
        part, of_grad = (t.tensor_split(comm.size, dim or 0)[comm.rank] for t in (start, grad))
    model = nn.Module()
    model.weight = nn.Parameter(part.clone())
    model.weight.grad = of_grad.clone()
    if comm.size > 1 and not flat:
        model.weight.tensor_model_parallel = True
        model.weight.partition_dim = dim
    roles = Roles(dense=axes, expert=axes, everyone=comm)
    config = replace(SGD, use_distributed_optimizer=flat)
    get_optimizer(config, [model], {}, pg_collection=roles, hooks=(hook,)).step()
    return model.weight.detach()


def test_a_floor_of_rows_is_that_of_the_weights_on_every_rank() -> None:
    """Rank 0 holds rows whose update is small compared with their weights."""
    generator = torch.Generator().manual_seed(0)
    grad, start = (torch.randn(8, 6, generator=generator).sign() for _ in range(2))
    grad[:4] *= 0.01
    want = start - torch.cat([grad[:4] * 50, grad[4:]])
    for size in (1, 2):
        parts = run_threads(size, lambda comm: moved(grad, RowFloor(0.5), comm, start=start))
        torch.testing.assert_close(torch.cat(parts), want, rtol=1e-5, atol=1e-6)


# The shape; ranks that own flat shards of it, or parts cut along a dim.
CUT_ROWS: list[tuple[tuple[int, ...], int, int | None]] = [
    *((shape, ranks, None) for shape in ((5, 701), (3, 2, 1, 501), (1, 2003), (1301, 1), (1, 3)) for ranks in (1, 4)),
    *(((4, 6), 2, dim) for dim in (0, 1)),
]


@pytest.mark.parametrize(("shape", "ranks", "dim"), CUT_ROWS, ids=str)
def test_rows_that_ranks_cut_lose_their_whole_mean(shape: tuple[int, ...], ranks: int, dim: int | None) -> None:
    """Over flat shards a mean of float64 sums, rounded once, where one process takes it in float32. Tensor-parallel
    ranks that hold different rows must not be summed."""
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    want = grad.mean(tuple(range(1, grad.dim())), keepdim=True) - grad
    found = run_threads(ranks, lambda comm: moved(grad, CentralizeGradient(), comm, dim=dim, flat=dim is None))
    for whole in found if dim is None else [torch.cat(found, dim)]:
        torch.testing.assert_close(whole, want, rtol=0.0, atol=2.0**-22)


# --- refusals and checkpoints -----------------------------------------------------------------------------------------

PLAIN = OptimizerConfig(lr=0.02, weight_decay=0.1)


def build(
    comm: Comm, given: Any, model: nn.Module | None = None, config: OptimizerConfig = PLAIN, **changes: Any
) -> Any:
    model = model or Net(torch.float32)
    return get_optimizer(replace(config, **changes), [model], {}, pg_collection=roles_over(comm), hooks=given)


def zeros_on_a_sphere(radius: float | None = None) -> Any:
    model = Net(torch.float32, {"first": (4, 4), "embedding": (4, 4), "qkv": (12, 4)})
    with torch.no_grad():
        model.qkv.weight.zero_()
    return build(Alone(), {"muon": (Hyperball(radius=radius),)}, model, optimizer="muon", weight_decay=0.0)


def cut_rows(comm: Comm) -> Any:
    return build(comm, (RowFloor(0.5),), nn.Linear(4, 4, bias=False), SGD, use_distributed_optimizer=True)


REFUSED: dict[str, tuple[Callable[[Comm], object], str]] = {
    "an unused rule": (
        lambda comm: build(comm, {"muon": (CautiousDecay(),)}),
        "hooks has 'muon', but parameters are updated by adam",
    ),
    "a vector on a sphere": (
        lambda comm: build(comm, (Hyperball(),), weight_decay=0.0),
        "'bias.weight': its shape is (7,), and it is for matrices",
    ),
    "decay on a sphere": (
        lambda comm: build(comm, {"muon": (Hyperball(),)}, optimizer="muon"),
        "weight_decay=0.1, but Hyperball() fixes",
    ),
    "rows cut in an unknown dim": (
        lambda comm: moved(torch.ones(4, 4), CentralizeGradient(), comm, dim=None),
        "tensor parallelism cuts it along an unknown dim; set its partition_dim",
    ),
    "floors of rows that span ranks": (cut_rows, "the hook needs whole rows, which this layout cuts over ranks"),
    "zeros on a sphere": (lambda comm: zeros_on_a_sphere(), "'qkv.weight' is all zeros; use Hyperball"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank(name: str) -> None:
    attempt, words = REFUSED[name]

    def rank_main(comm: Comm) -> str:
        with pytest.raises(ConfigError) as caught:
            attempt(comm)
        return str(caught.value)

    assert all(words in message for message in run_threads(2, rank_main))
    zeros_on_a_sphere(radius=1.0)


def test_other_hooks_at_resume_are_named(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    given = (CautiousDecay(), ClipUpdateRms(0.5))
    model = Net(torch.float32)
    optimizer = build(Alone(), given, model)
    save(sharded_state(model, optimizer), tmp_path / "saved")
    for now, listed in ((given, "none"), ((CautiousDecay(),), "CautiousDecay()"), ((), "none")):
        other_model = Net(torch.float32)
        other = build(Alone(), now, other_model)
        loaded = load(sharded_state(other_model, other), tmp_path / "saved").state["optimizer"]
        for state in (loaded, optimizer.state_dict()):
            caplog.clear()
            with caplog.at_level(logging.WARNING, logger="opt_stack"):
                other.load_state_dict(state)
            saved_with = "but was saved with CautiousDecay(), ClipUpdateRms(threshold=0.5)"
            assert (f"continues with hooks {listed}, {saved_with}" in caplog.text) is (now != given)
            assert ("continues with" in caplog.text) is (now != given)
            assert all(group.get("hooks", ()) == tuple(map(repr, now)) for group in other.param_groups)
