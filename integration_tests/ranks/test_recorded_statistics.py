"""Norms, zeros and statistics of parameters over data-, tensor-, expert- and pipeline-parallel ranks, in float64."""

import math
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from cut_ranks import EVEN, fsdp, fsdp_x_tp, hsdp, record, replicas_of_tp, tp, tp_on_a_part_of_the_mesh, two_axes
from expert_grid import Net, Place, mean_gradients, parts, run_grid
from grids import comms_of
from parity import Held, roles_over
from processes import FSDP2_RUNS, Job, run_jobs
from tiers import NIGHT, sampled
from torch import nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_stack import Optimizer, StepStats, get_optimizer

LR = 0.5
CLIP = 0.1
SGD: dict[str, Any] = {"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0}
GRIDS = {
    "tp 4": {"tp": 4, "ep": 1, "etp": 4},
    "ep 4": {"tp": 1, "ep": 4, "etp": 1},
    "tp 4, ep 4": {"tp": 4, "ep": 4, "etp": 1},
    "tp 2, ep 2, etp 2": {"tp": 2, "ep": 2, "etp": 2},
    "tp 2, ep 2": {"tp": 2, "ep": 2, "etp": 1},
    "tp 4, ep 2, etp 2": {"tp": 4, "ep": 2, "etp": 2},
}
KINDS = {"replicated": {}, "flat": {"use_distributed_optimizer": True}}


@pytest.mark.parametrize(("grid", "kind", "wrapped"), sampled([*product(GRIDS, KINDS, (False, True))], tuple))
def test_numbers_are_those_of_the_whole_model_in_float64(grid: str, kind: str, wrapped: bool) -> None:
    sizes = GRIDS[grid]
    config = OptimizerConfig(lr=LR, clip_grad=CLIP, log_num_zeros_in_grad=True, **SGD, **KINDS[kind])

    def rank_main(place: Place) -> tuple[list[StepStats], int | None]:
        model: nn.Module = Net(place)
        if wrapped:
            ddp = DistributedDataParallelConfig(use_distributed_optimizer=config.use_distributed_optimizer)
            model = DistributedDataParallel(ddp, model, groups=place.roles)
        optimizer = get_optimizer(config, [model], {}, pg_collection=place.roles)
        records: list[StepStats] = []
        optimizer.stats_every(2, records.append)
        for _ in range(3):
            model(parts(place)).backward()
            result = optimizer.step()
            assert result.success
            optimizer.zero_grad()
        assert [record.step for record in records] == [1, 3]
        assert records[-1] == optimizer.stats()
        return records, result.num_zeros_in_grad

    dp = 4 // sizes["tp"]
    expert_dp = 4 // sizes["ep"] // sizes["etp"]
    whole = {
        name: (Held(tuple(mean.shape), torch.float32, torch.Generator().manual_seed(1)).weight.detach().double(), mean)
        for name, mean in mean_gradients(dp=dp, ep=sizes["ep"], expert_dp=expert_dp).items()
    }
    norm = torch.cat([grad.flatten() for _, grad in whole.values()]).norm().item()
    clip = CLIP / (norm + 1e-6)
    per_rank, zeros = zip(*run_grid(rank_main, **sizes))
    assert set(zeros) == {sum(int((grad == 0).sum()) for _, grad in whole.values())}
    assert all(records == per_rank[0] for records in per_rank)
    if dp > 1 and expert_dp > 1:  # then every gradient of a rank is reduced in a buffer
        local = run_grid(lambda place: torch.cat([grad.flatten() for grad in parts(place).values()]).norm(), **sizes)
        assert list(per_rank[0][0].rank_norms.values()) == pytest.approx(list(map(float, local)), rel=1e-5)
    for stats, made in zip(per_rank[0], (0, 2), strict=True):
        assert (stats.updates, stats.success, stats.reason) == (made, True, "")
        assert stats.clip == pytest.approx(clip, rel=1e-5)
        assert stats.grad_norm == pytest.approx(norm, rel=1e-5)
        assert stats.params.keys() == {f"{name}.weight" for name in whole}
        assert all(f"\n{name}.weight " in str(stats) for name in whole)
        weights = []
        for name, (first, grad) in whole.items():
            of = stats.params[f"{name}.weight"]
            weight = first - made * LR * clip * grad
            weights.append(weight.flatten())
            assert of.grad_norm == pytest.approx(grad.norm().item(), rel=1e-5)
            assert of.weight_norm == pytest.approx(weight.norm().item(), rel=1e-5)
            assert of.update_norm == pytest.approx(LR * clip * grad.norm().item(), rel=1e-4)
            assert of.zeros == pytest.approx((grad == 0).double().mean().item())
            assert of.numel == grad.numel()
        of_groups = math.hypot(*(group.weight_norm for group in stats.groups.values()))
        assert of_groups == pytest.approx(torch.cat(weights).norm().item(), rel=1e-5)
        assert all(local is not None for local in stats.rank_norms.values()) or dp == expert_dp == 1


def stats_of_one_weight(roles: Roles, comm: Comm, **fields: Any) -> StepStats:
    """The statistics of a step with a gradient of the rank's number and one."""
    net = Held((6,), torch.float32, torch.Generator().manual_seed(0))
    optimizer = get_optimizer(OptimizerConfig(lr=0.1, **fields), [net], {}, pg_collection=roles)
    optimizer.stats_every(1)
    net.weight.grad = torch.full((6,), 1.0 + comm.rank)
    optimizer.step()
    return optimizer.stats()


def test_stages_may_have_parameters_of_one_name() -> None:
    first, second = run_threads(2, lambda comm: stats_of_one_weight(roles_over(everyone=comm), comm))
    assert first == second
    assert {name: of.grad_norm for name, of in first.params.items()} == pytest.approx(
        {"weight (rank 0)": math.sqrt(6), "weight (rank 1)": 2 * math.sqrt(6)}
    )


@pytest.mark.parametrize("has_instance", [False, True])
def test_ranks_of_all_optimizer_instances_are_counted_once(has_instance: bool) -> None:
    shards = comms_of([[0, 1], [2, 3]])
    others = comms_of([[0, 2], [1, 3]])

    def rank_main(comm: Comm) -> StepStats:
        axes = Axes(dp=shards[comm.rank], tp=Alone(), inter=others[comm.rank])
        instance = shards[comm.rank] if has_instance else None
        roles = Roles(dense=axes, expert=axes, everyone=comm, instance=instance)
        return stats_of_one_weight(roles, comm, use_distributed_optimizer=True)

    first, *rest = run_threads(4, rank_main)
    assert all(stats == first for stats in rest)
    assert first.rank_norms == pytest.approx({rank: (1 + rank) * math.sqrt(6) for rank in range(4)})
    assert first.params["weight"].grad_norm == pytest.approx(2.5 * math.sqrt(6))


def two_ranks(comm: Comm, *, wrapped: bool = False, **fields: Any) -> tuple[nn.Module, Optimizer]:
    generator = torch.Generator().manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) / 4)
    roles = roles_over(comm)
    config = OptimizerConfig(lr=0.01, **fields)
    if wrapped:
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=config.use_distributed_optimizer)
        net = DistributedDataParallel(ddp, net, groups=roles)
    return net, get_optimizer(config, [net], pg_collection=roles)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_a_skipped_step_names_parameter_and_rank_once_on_all(kind: str, bad: float) -> None:
    def rank_main(comm: Comm) -> tuple[list[str], str]:
        net, optimizer = two_ranks(comm, **KINDS[kind])
        for step in range(4):
            net(torch.ones(3, 4)).sum().backward()
            if comm.rank == 1 and step in (1, 2):
                net[2].weight.grad[0, 0] = bad
            assert optimizer.step().success is (step not in (1, 2))
            optimizer.zero_grad()
        return optimizer.report()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="the gradient of '2.weight' .* was written")
        first, second = run_threads(2, rank_main)
    assert first == second
    what = "NaN" if math.isnan(bad) else "infinite values"
    sentence = f"was skipped on every rank: {what} in the gradient of '2.weight', on rank 1 before the mean over ranks"
    assert [str(each.message).partition(". ")[0] for each in caught] == [f"step 2 {sentence}"] * 2
    assert first.startswith(
        f"4 steps: 2 applied, 2 skipped or refused\n  2 times (steps 2 to 3): {sentence}\nstep 3 (skipped: overflow)"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:step 1 was skipped")
def test_a_nan_on_one_rank_skips_the_step_on_every_rank(kind: str) -> None:
    def rank_main(place: Place, name: str) -> bool:
        model = Net(place)
        optimizer = get_optimizer(OptimizerConfig(lr=LR, **SGD, **KINDS[kind]), [model], {}, pg_collection=place.roles)
        model(parts(place)).backward()
        named = {key.rstrip("01"): module for key, module in model.named_children()}
        named[name].weight.grad.view(-1)[-1] = math.nan if place.world.rank == 3 else 0.0
        return optimizer.step().success

    for name in ("column", "norm", "up", "bias"):
        assert run_grid(partial(rank_main, name=name), tp=2, ep=2, etp=2) == [False] * 4, name


def test_wrapped_models_name_the_rank_from_the_second_skip_on() -> None:
    def rank_main(comm: Comm) -> str:
        net, optimizer = two_ranks(comm, wrapped=True, use_distributed_optimizer=True)
        for _ in range(2):
            net(torch.full((3, 4), math.nan if comm.rank == 1 else 1.0)).square().sum().backward()
            assert not optimizer.step().success
            optimizer.zero_grad()
        return optimizer.report()

    with pytest.warns(UserWarning, match="all 4 parameters"):
        first, second = run_threads(2, rank_main)
    assert first == second
    assert "1 time (step 1): was skipped on every rank: NaN in the gradient of all 4 parameters\n" in first
    assert "1 time (step 2): was skipped on every rank: NaN in the gradient of all 4 parameters, on rank 1" in first


@pytest.mark.parametrize(
    ("limit", "warning"),
    [
        (0.5, "is above grad_norm_skip_threshold=0.5; the largest is that of '0.weight'"),
        (1e9, "was refused on every rank by rank 1, guard UsableGroups: .*lr"),
    ],
)
def test_reports_name_the_largest_param_or_the_refusing_guard(limit: float, warning: str) -> None:
    def rank_main(comm: Comm) -> str:
        net, optimizer = two_ranks(comm, grad_norm_skip_threshold=limit)
        net(torch.ones(3, 4)).sum().mul(100).backward()
        if comm.rank == 1 and limit > 1:
            optimizer.param_groups[0]["lr"] = None
        with nullcontext() if limit < 1 else pytest.raises((ValueError, RuntimeError)):
            assert not optimizer.step().success
        return optimizer.report()

    with pytest.warns(UserWarning, match=warning):
        first, second = run_threads(2, rank_main)
    assert first == second
    assert "1 steps: 0 applied, 1 skipped or refused" in first


@pytest.mark.parametrize(("layer_wise", "bad"), [(False, False), (True, False), (True, True)])
def test_singular_value_spread_is_that_of_the_whole_matrix(layer_wise: bool, bad: bool) -> None:
    """Of weights that are not finite it is NaN, and every rank goes on."""

    def rank_main(comm: Comm) -> tuple[StepStats, float]:
        net, optimizer = two_ranks(comm, optimizer="muon", use_layer_wise_distributed_optimizer=layer_wise)
        optimizer.stats_every(1, spectrum=True)
        values = torch.linalg.svdvals(net[0].weight.detach().double())
        if bad:
            net[0].weight.data[0, 0] = math.nan
            optimizer.reload_model_params()
        net(torch.ones(3, 4)).sum().backward()
        assert optimizer.step().success != bad
        return optimizer.stats(), math.nan if bad else (values[0] / values[-1]).item()

    with pytest.warns(UserWarning, match="NaN in the gradient of '2.weight'") if bad else nullcontext():
        found = run_threads(2, rank_main)
    for stats, spread in found:
        assert stats.params["0.weight"].spread == pytest.approx(spread, rel=1e-4, nan_ok=True)
        assert stats.params["0.bias"].spread is None


def test_arguments_that_differ_by_rank_are_refused_on_every_rank() -> None:
    def rank_main(comm: Comm) -> None:
        _, optimizer = two_ranks(comm)
        with pytest.raises(ValueError, match=r"ranks differ \(rank 0: stats_every\(1, .*; rank 1: stats_every\(-2, "):
            optimizer.stats_every(1 if comm.rank == 0 else -2)

    run_threads(2, rank_main)


LAYOUTS = (hsdp, fsdp_x_tp, tp_on_a_part_of_the_mesh, two_axes, *((fsdp, tp, replicas_of_tp) if NIGHT else ()))


@pytest.mark.skipif(not FSDP2_RUNS, reason="this torch runs FSDP2 on GPUs only")
def test_numbers_of_dtensors_are_those_of_plain_parameters() -> None:
    config = OptimizerConfig(optimizer="muon", lr=0.01, clip_grad=0.1, muon_tp_mode="duplicated")
    jobs = {layout.__name__: Job(record, (config, EVEN, layout)) for layout in LAYOUTS}
    found = run_jobs(4, {"plain": Job(record, (config, EVEN, None)), **jobs})
    (expected, *_) = found.pop("plain")
    for layout, per_rank in found.items():
        for stats in per_rank:
            assert stats.params.keys() == expected.params.keys()
            for name, numbers in stats.params.items():
                same = [number or 0.0 for number in expected.params[name]]  # a vector has no spread
                assert [number or 0.0 for number in numbers] == pytest.approx(same, rel=1e-3), (layout, name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_group_is_clipped_alone_and_empty_has_norm_0(kind: str) -> None:
    """After a NaN it was infinite: `{'': nan, 'mtp': inf}`."""

    def rank_main(comm: Comm) -> tuple[list[float], list[float], dict[str, float]]:
        net = nn.Module()
        config = OptimizerConfig(lr=1.0, clip_grad=0.1, **SGD, **KINDS[kind])
        net.trunk = nn.Parameter(torch.zeros(16))
        net.mtp = nn.Parameter(torch.zeros(4))
        net.mtp.grad_norm_group = "mtp"
        optimizer = get_optimizer(config, [net], {}, pg_collection=roles_over(comm))
        # Norms above the limit.
        net.trunk.grad = torch.full((16,), 0.5 / 4)
        net.mtp.grad = torch.full((4,), 0.25 / 2)
        optimizer.step()
        bare = Held((4,), torch.float32, torch.Generator().manual_seed(0))
        other = get_optimizer(config, [bare], {}, pg_collection=roles_over(comm))
        bare.weight.grad = torch.full((4,), math.nan)
        assert not other.step().success
        return net.trunk.unique().tolist(), net.mtp.unique().tolist(), other.grad_norms_by_group

    for trunk, mtp, norms in run_threads(2, rank_main):
        assert trunk == pytest.approx([-0.1 / 4], rel=1e-4)
        assert mtp == pytest.approx([-0.1 / 2], rel=1e-4)
        assert math.isnan(norms.pop(""))
        assert norms["mtp"] == 0.0
