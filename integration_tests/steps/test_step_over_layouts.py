"""What a step does on any layout: norms, clipping, collectives and their order, several instances and chunks."""

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from layouts import SPREADS, config, mean_grads, norm_of, step_once
from parity import LR, SHAPES, Net, grads_of, roles_over
from torch import Tensor, nn

from opt_config import ConfigError, ParamKey
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_stack import Optimizer, get_optimizer

every_spread = pytest.mark.parametrize("spread", list(SPREADS))


# --- norms and clips -------------------------------------------------------------------------------------------------

MATRICES = ("first", "qkv", "second", "router")


@pytest.mark.parametrize("spread", ["replicated", "whole"])
def test_a_rule_that_is_not_clipped_stays_out_of_the_global_norm_and_reports_its_own(spread: str) -> None:
    """Megatron-Core clips Muon's gradients by a norm that its update does not depend on, down to where Newton-Schulz's
    eps matters, and counts them in the norm that clips others. A group's clip_grad=False removes both."""
    rest = [name for name in SHAPES if name not in MATRICES]
    unclipped = {ParamKey(name=tuple(f"{name}.weight" for name in MATRICES)): {"clip_grad": False}}

    def norms(comm: ThreadComm) -> Mapping[str, float]:
        optimizer = step_once(config(optimizer="muon", **SPREADS[spread]), comm, overrides=unclipped)
        assert optimizer.last.grad_norm == optimizer.grad_norms_by_group[""]
        return optimizer.grad_norms_by_group

    for found in run_threads(3, norms):
        assert found == pytest.approx({"": norm_of(rest), "mtp": 0.0, "muon": norm_of(MATRICES)}, rel=1e-6)


@every_spread
def test_clip_grad_false_leaves_the_gradients_as_they_are(spread: str) -> None:
    """With SGD without momentum the update shows the gradient."""

    def moved(comm: ThreadComm) -> dict[str, Tensor]:
        net = Net(torch.float32)
        start = {name: p.detach().clone() for name, p in net.named_parameters()}
        sgd = config(optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, **SPREADS[spread])
        step_once(sgd, comm, overrides={ParamKey(name="first.weight"): {"clip_grad": False}}, net=net)
        return {name: (start[name] - p.detach()) / LR for name, p in net.named_parameters()}

    clip = 1.0 / (norm_of(name for name in SHAPES if name != "first") + 1e-6)
    for found in run_threads(2, moved):
        # What is left of a difference of weights below 1 after a division by lr: 2**-24 / 0.02.
        torch.testing.assert_close(found["first.weight"], mean_grads()["first"], rtol=0, atol=5e-6)
        torch.testing.assert_close(found["qkv.weight"], mean_grads()["qkv"] * clip, rtol=0, atol=5e-6)


def test_clip_grad_of_a_group_is_yes_or_no() -> None:
    with pytest.raises(ConfigError, match=r"clip_grad=0.5; allowed are True .* and False"):
        get_optimizer(config(), [Net(torch.float32)], {ParamKey(name="first.weight"): {"clip_grad": 0.5}})


@every_spread
@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf], ids=["1", "3", "inf"])
def test_other_norms_are_those_of_the_mean_gradient(spread: str, norm_type: float) -> None:
    """They are of unscaled gradients, and each element counts once on any layout."""

    def norm(comm: ThreadComm) -> float:
        net = Net(torch.float32)
        adam = config(loss_scale=8.0, **SPREADS[spread])
        optimizer = get_optimizer(adam, [net], {}, pg_collection=roles_over(comm))
        optimizer.scale_loss(net(grads_of(0, comm.rank, comm.size))).backward()
        assert not optimizer.prepare_grads()
        return optimizer.get_grad_norm(norm_type)

    everything = torch.cat([grad.double().flatten() for grad in mean_grads().values()])
    want = torch.linalg.vector_norm(everything, norm_type).item()
    assert run_threads(3, norm) == pytest.approx([want] * 3, rel=1e-6)


@every_spread
def test_a_separate_norm_group_has_its_own_norm_and_its_own_clip(spread: str) -> None:
    def norms(comm: ThreadComm) -> Mapping[str, float]:
        net = Net(torch.float32)
        net.second.weight.grad_norm_group = "mtp"
        return step_once(config(**SPREADS[spread]), comm, net=net).grad_norms_by_group

    rest = [name for name in SHAPES if name != "second"]
    for found in run_threads(2, norms):
        assert found == pytest.approx({"": norm_of(rest), "mtp": norm_of(["second"])}, rel=1e-6)


@every_spread
def test_the_halves_of_a_step_may_be_clipped_and_counted_by_the_caller(spread: str) -> None:
    """Megatron-Core's protocol, one call after the other, is a step with that clip: norm groups keep their own."""

    def halves(
        comm: ThreadComm, clip_grad: float, *, whole: bool
    ) -> tuple[list[Tensor], float, int | None, list[bool]]:
        net = Net(torch.float32)
        net.second.weight.grad_norm_group = "mtp"
        fields = SPREADS[spread] | {"clip_grad": clip_grad if whole else 3.0, "log_num_zeros_in_grad": whole}
        optimizer = get_optimizer(config(**fields), [net], {}, pg_collection=roles_over(comm))
        net(with_zeros(grads_of(0, comm.rank, comm.size))).backward()
        if whole:
            _, norm, zeros = optimizer.step()
        else:
            assert not optimizer.prepare_grads()
            norm, zeros = optimizer.clip_grad_norm(clip_grad), optimizer.count_zeros()
            assert optimizer.step_with_ready_grads()
        groups = [optimizer.has_grad_norm_group(name) for name in ("", "mtp")]
        return [p.detach().clone() for p in net.parameters()], norm, zeros, groups

    for clip_grad in (0.0, 0.25):
        at_once = run_threads(3, lambda comm, clip=clip_grad: halves(comm, clip, whole=True))
        in_halves = run_threads(3, lambda comm, clip=clip_grad: halves(comm, clip, whole=False))
        for (weights, *message), (ours, *reported) in zip(at_once, in_halves, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(weights, ours, strict=True))
            assert reported == message
            assert message[1:] == [13, [True, True]]


def with_zeros(grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As they are, but for 13 elements on every rank."""
    zeros = torch.zeros(13)
    return {**grads, "norm": torch.cat([zeros, grads["norm"][13:]])}


BETWEEN: dict[str, tuple[Callable[[Optimizer], object], str]] = {
    "another norm": (lambda optimizer: optimizer.clip_grad_norm(0.5), r"clip to different norms: \[0\.5, 1\.0\]"),
    "another rate": (lambda optimizer: optimizer.param_groups[0].update(lr=0.5), "has different numbers on the ranks"),
    "no rate": (lambda optimizer: optimizer.param_groups[0].update(lr=None), "lr of group 'default' is None"),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_one_rank_changes_between_the_halves_of_a_step_is_refused_on_every_rank(name: str) -> None:
    """Its weights were updated with another number than those of its replicas, without an error."""
    change, message = BETWEEN[name]

    def rank_main(comm: ThreadComm) -> None:
        net = Net(torch.float32)
        optimizer = get_optimizer(config(), [net], {}, pg_collection=roles_over(comm))
        net(grads_of(0, comm.rank, comm.size)).backward()
        before = [param.detach().clone() for param in net.parameters()]
        assert not optimizer.prepare_grads()
        if comm.rank == 1:
            change(optimizer)
        with pytest.raises(ValueError, match=message):
            optimizer.step_with_ready_grads()
        assert all(map(torch.equal, before, net.parameters()))

    run_threads(2, rank_main)


def test_norms_that_do_not_exist_are_refused() -> None:
    optimizer = get_optimizer(config(), [Net(torch.float32)], {})
    with pytest.raises(ValueError, match=r"clip_grad=-1\.0; pass a norm above 0, or 0 for no clipping"):
        optimizer.clip_grad_norm(-1.0)
    with pytest.raises(ValueError, match="grad_norm_group 'other': allowed are '', 'mtp'"):
        optimizer.has_grad_norm_group("other")
    assert not optimizer.has_grad_norm_group("mtp")
    assert optimizer.get_grad_stats_parallel_group() is None


@every_spread
def test_a_norm_above_the_threshold_skips_the_step_on_every_rank(spread: str) -> None:
    def skipped(comm: ThreadComm) -> bool:
        net = Net(torch.float32)
        before = [p.detach().clone() for p in net.parameters()]
        strict = config(grad_norm_skip_threshold=norm_of(SHAPES) * 0.99, **SPREADS[spread])
        success = step_once(strict, comm, net=net).last.success
        return not success and all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))

    assert run_threads(2, skipped) == [True, True]


@every_spread
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
def test_a_norm_that_is_not_finite_refuses_the_step_where_megatron_core_continues(spread: str, bad: float) -> None:
    """Megatron-Core steps with gradients whose norm is NaN, unclipped, and zeroes them where it is infinite."""

    def refused(comm: ThreadComm) -> bool:
        net = Net(torch.float32)
        optimizer = get_optimizer(config(**SPREADS[spread]), [net], {}, pg_collection=roles_over(comm))
        before = [p.detach().clone() for p in net.parameters()]
        net(grads_of(0, comm.rank, comm.size)).backward()
        if comm.rank == 1:
            net.bias.weight.grad[2] = bad
        result = optimizer.step()
        same = all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        return same and not result.success and not math.isfinite(result.grad_norm)

    assert run_threads(2, refused) == [True, True]


# --- parameters without a gradient -----------------------------------------------------------------------------------


class Partly(nn.Module):
    """Parameters of which a step uses some, and one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle, self.lone = (nn.Parameter(torch.ones(numel)) for numel in (5, 70, 3))
        self.expert = nn.Parameter(torch.ones(4))
        self.expert.allreduce = False


@pytest.mark.parametrize("spread", ["replicated", "flat"])
def test_zeros_of_a_parameter_that_no_rank_used_are_not_counted(spread: str) -> None:
    """Two ranks hold each expert: no rank uses the first, one rank uses the second."""
    expert_dp = [World(2).comms() for _ in range(2)]

    def rank_main(comm: ThreadComm) -> list[int | None]:
        row, expert = divmod(comm.rank, 2)
        experts = Axes(dp=expert_dp[expert][row], tp=Alone())
        roles = Roles(dense=Axes(dp=comm, tp=Alone()), expert=experts, everyone=comm)
        net = Partly()
        counts = config(log_num_zeros_in_grad=True, **SPREADS[spread])
        optimizer = get_optimizer(counts, [net], {}, pg_collection=roles)
        net.used.grad = torch.tensor([0.0, 1.0, 2.0, 0.0, 3.0])
        if comm.rank == 0:
            net.lone.grad = torch.tensor([1.0, 0.0, 2.0])
        if comm.rank == 3:
            net.expert.grad = torch.tensor([0.0, 0.0, 0.0, 1.0])
        first = optimizer.step().num_zeros_in_grad
        net.idle.grad = torch.zeros(70)
        return [first, optimizer.step().num_zeros_in_grad]

    assert run_threads(4, rank_main) == [[2 + 1 + 3, 2 + 1 + 3 + 70]] * 4
