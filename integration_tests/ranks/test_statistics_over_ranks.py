"""Norms, zeros and finiteness over tensor-, expert- and data-parallel ranks, against float64 on one process."""

import math

import pytest
import torch
from parity import Held
from statistics_grid import KINDS, Net, Place, parts, run_grid
from torch import Tensor, nn

from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm
from opt_stack import get_optimizer


@pytest.mark.parametrize("where", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["column", "norm", "up", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_on_one_rank_stops_every_rank(kind: str, name: str, where: int) -> None:
    """Also in a copy that norms do not count: tensor-parallel ranks compute their gradients of a norm separately."""
    config = OptimizerConfig(lr=0.01, **KINDS[kind])

    def rank_main(place: Place) -> bool:
        net = Net(place)
        optimizer = get_optimizer(config, [net], {}, pg_collection=place.roles)
        grads = parts(place)
        if place.world.rank == where:
            key = name if name in grads else f"{name}{place.experts[0]}"
            grads[key].view(-1)[0] = (math.inf, math.nan)[where % 2]
        net(grads).backward()
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        result = optimizer.step()
        assert not math.isfinite(result.grad_norm)
        assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())
        return result.success

    assert run_grid(rank_main, tp=2, ep=2, etp=2) == [False] * 4


def test_a_nan_in_the_copy_of_a_shared_parameter_stops_every_rank() -> None:
    """`shared` marks the copy that another pipeline stage counts."""

    def rank_main(comm: ThreadComm) -> bool:
        net = Held((6,), torch.float32, torch.Generator().manual_seed(1))
        net.weight.shared = comm.rank == 1
        axes = Axes(dp=Alone(), tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        optimizer = get_optimizer(OptimizerConfig(lr=0.01), [net], {}, pg_collection=roles)
        net.weight.grad = torch.full((6,), math.nan if comm.rank == 1 else 1.0)
        return optimizer.step().success

    assert run_threads(2, rank_main) == [False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_a_separate_norm_group_is_clipped_by_its_own_norm(kind: str) -> None:
    """SGD without momentum shows the clipped gradients: each norm group is scaled by its own coefficient."""
    norms = {"": 0.5, "mtp": 0.25}  # the model's own; both above the limit
    limit, lr = 0.1, 1.0

    def rank_main(comm: ThreadComm) -> dict[str, Tensor]:
        net = nn.Module()
        net.own, net.mtp = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(4))
        net.mtp.grad_norm_group = "mtp"
        config = OptimizerConfig(
            optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, lr=lr, clip_grad=limit, **KINDS[kind]
        )
        axes = Axes(dp=comm, tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        optimizer = get_optimizer(config, [net], {}, pg_collection=roles)
        net.own.grad, net.mtp.grad = torch.full((16,), norms[""] / 4), torch.full((4,), norms["mtp"] / 2)
        optimizer.step()
        return {"own": net.own.detach().clone(), "mtp": net.mtp.detach().clone()}

    for weights in run_threads(2, rank_main):
        torch.testing.assert_close(weights["own"], torch.full((16,), -lr * limit / 4), rtol=1e-4, atol=0)
        torch.testing.assert_close(weights["mtp"], torch.full((4,), -lr * limit / 2), rtol=1e-4, atol=0)


def test_a_norm_group_without_parameters_has_the_norm_0_after_a_nan() -> None:
    """It was infinite: `{'': nan, 'mtp': inf}`."""
    net = nn.Linear(2, 2)
    optimizer = get_optimizer(OptimizerConfig(lr=0.1), [net], {})
    net.weight.grad = torch.full((2, 2), math.nan)
    assert not optimizer.step().success
    norms = optimizer.grad_norms_by_group
    assert math.isnan(norms[""])
    assert norms["mtp"] == 0.0
