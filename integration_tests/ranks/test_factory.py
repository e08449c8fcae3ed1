"""The factory on several ranks: one verdict for all, ranks without parameters, files written once, identical groups."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from tiny_model import joined_batch, make_model, train_here, weights
from torch import Tensor, nn

from opt_config import OptimizerConfig
from opt_stack import ProcessGroups, get_optimizer


class Ran(NamedTuple):
    """The results of some steps on one rank."""

    is_stub: bool
    results: list[tuple[Any, ...]]
    scales: list[float]
    weights: dict[str, Tensor]


def with_empty_ranks(config: OptimizerConfig, dtype: torch.dtype, empty: tuple[int, ...], bad_step: int) -> Ran:
    """Steps of a world in which the ranks `empty` train nothing; the others share the joined batch evenly.

    In step `bad_step` the last of those that train has an infinite gradient.
    """
    rank = dist.get_rank()
    training = [r for r in range(dist.get_world_size()) if r not in empty]
    model = make_model(dtype)
    if rank in empty:
        model.requires_grad_(False)
    optimizer = get_optimizer(config, [model])
    results, scales = [], []
    for step in range(5):
        optimizer.zero_grad()
        if rank in training:
            local_batch = joined_batch(step).chunk(len(training))[training.index(rank)]
            optimizer.scale_loss(model(local_batch)).backward()
            if step == bad_step and rank == training[-1]:
                model.head.weight.grad[0, 0] = torch.inf
        results.append(tuple(optimizer.step()))
        scales.append(optimizer.get_loss_scale().item())
    return Ran(optimizer.is_stub_optimizer, results, scales, weights(model))


# --- one world, many questions ----------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """One rank's view of a model that is split over pipeline stages."""

    group_names: list[str]
    num_params: list[int]
    norm: float
    own_norm: float


def stages(folder: str) -> Stage:
    """Two pipeline stages with other parameters each: the same groups, one norm; and the files that are written."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    layer = nn.Linear(3, 4) if rank == 0 else nn.Linear(4, 2, bias=False)
    groups = ProcessGroups(dp=None, expt_dp=None, mp=dist.group.WORLD, tp_ep_pp=dist.group.WORLD)
    config = OptimizerConfig(lr=1e-2, config_logger_dir=f"{folder}/logs")
    optimizer = get_optimizer(config, [layer], pg_collection=groups, dump_param_to_param_group_map=f"{folder}/map")
    layer(torch.ones(2, layer.in_features)).square().sum().backward()
    own = torch.stack([param.grad.norm() for param in layer.parameters()]).norm().item()
    norm = optimizer.step().grad_norm
    return Stage(
        [group["name"] for group in optimizer.param_groups],
        [len(group["params"]) for group in optimizer.param_groups],
        norm,
        own,
    )


def unwritable(path: str) -> str:
    """Ask for logs in a folder that rank 0 cannot write to."""
    try:
        get_optimizer(OptimizerConfig(lr=1e-2, config_logger_dir=path), [make_model()])
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def stages_and_unwritable(folder: str) -> tuple[Stage, str]:
    blocked = Path(folder) / "file"
    if dist.get_rank() == 0:
        blocked.write_text("")
    dist.barrier()
    return stages(folder), unwritable(f"{blocked}/logs")


# --- ranks without parameters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "empty", "config", "dtype", "bad_step"),
    [
        pytest.param(
            2,
            (1,),
            OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.3, log_num_zeros_in_grad=True),
            torch.float32,
            -1,
            id="one-of-two",
        ),
        pytest.param(
            3,
            (0,),
            OptimizerConfig(lr=1e-2, fp16=True, initial_loss_scale=64.0, hysteresis=1, use_distributed_optimizer=True),
            torch.float16,
            2,
            id="first-of-three-sharded-overflow",
        ),
    ],
)
def test_a_rank_that_trains_nothing_has_the_result_of_those_that_do(
    size: int, empty: tuple[int, ...], config: OptimizerConfig, dtype: torch.dtype, bad_step: int
) -> None:
    ran = run_processes(size, with_empty_ranks, config, dtype, empty, bad_step)
    assert [rank.is_stub for rank in ran] == [rank in empty for rank in range(size)]
    for rank in ran[1:]:
        assert str(rank.results) == str(ran[0].results)  # as text: an infinite norm equals itself, a NaN too
        assert rank.scales == ran[0].scales
    successes = [result[0] for result in ran[0].results]
    assert successes == [step != bad_step for step in range(5)]
    start = weights(make_model(dtype))
    training = [ran[rank].weights for rank in range(size) if rank not in empty]
    for name, weight in start.items():
        assert all(torch.equal(ran[rank].weights[name], weight) for rank in empty)
        assert all(torch.equal(other[name], training[0][name]) for other in training)
    if bad_step < 0:
        want = train_here(config, steps=5, dtype=dtype)
        torch.testing.assert_close([result[1] for result in ran[0].results], want.norms, rtol=1e-5, atol=0)
        # The same sums in one process; Adam divides rounding noise of tiny gradients by its own size.
        torch.testing.assert_close(training[0], want.weights, rtol=1e-4, atol=2e-5)
    else:
        assert not math.isfinite(ran[0].results[bad_step][1])
        assert ran[0].scales == [64.0, 64.0, 32.0, 32.0, 32.0]


# --- one world, many questions ----------------------------------------------------------------------------------------


def test_stages_have_the_same_groups_one_norm_and_one_writer(tmp_path: Path) -> None:
    """What rank 0 cannot write fails on all ranks."""
    (first, error), (second, other_error) = run_processes(2, stages_and_unwritable, str(tmp_path))
    assert first.group_names == second.group_names == ["default", "*.bias or 1-D"]
    assert (first.num_params, second.num_params) == ([1, 1], [1, 0])
    assert first.norm == second.norm
    # Sums of squares in fp32 here, in fp64 there.
    assert first.norm == pytest.approx(math.hypot(first.own_norm, second.own_norm), rel=1e-6)
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert logs == ["optimizer_config.json", "optimizer_plan.txt"]
    # Both stages call their first parameter `weight`, and both have it in the default group.
    assert json.loads((tmp_path / "map.json").read_text())["group_of"] == {"weight": 0, "bias": 1}
    assert (tmp_path / "map" / ".metadata").exists()
    assert error.startswith("NotADirectoryError: ")
    assert other_error.startswith("ValueError: rank 0 refused: NotADirectoryError: ")
