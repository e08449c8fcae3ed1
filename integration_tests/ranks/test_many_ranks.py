"""Worlds of 64 ranks and more, as threads: each gradient element is reduced once over the right ranks, and counts once.

512 ranks at night.
"""

from typing import Any

import pytest
import torch
from grids import Grid, Place, thread_roles
from tiers import NIGHT, in_turn
from torch import Tensor, nn

from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Comm
from opt_distributed.comm.threads import World
from opt_stack import get_optimizer

GRIDS = {
    "dp 64": Grid(dp=64),
    "dp 32 x tp 2, ep 8": Grid(dp=32, tp=2, ep=8),
    "dp 16 x tp 4, ep 4 x etp 2, 2 instances": Grid(dp=16, tp=4, ep=4, etp=2, instances=2),
}
if NIGHT:
    GRIDS |= {"dp 256 x tp 2, ep 32": Grid(dp=256, tp=2, ep=32), "dp 64 x tp 8, ep 8": Grid(dp=64, tp=8, ep=8)}
SHARDINGS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "zero-1": {"use_distributed_optimizer": True},
    "layer-wise": {"use_layer_wise_distributed_optimizer": True},
}
COLS = 4


def gradients(place: Place) -> dict[str, Tensor]:
    """Of a rank: integers that tell its parts apart, and its replica. Sums of all ranks are exact."""
    columns = torch.arange(COLS, dtype=torch.float32)
    return {
        "cut": (100.0 * place.tp + columns).expand(2, COLS) + place.replica,
        "norm": columns + 2.0 * place.replica,
        "expert": (50.0 * place.ep + 10.0 * place.etp + columns).expand(2, COLS) + place.expert_replica,
    }


def means(grid: Grid) -> dict[str, dict[tuple[int, ...], Tensor]]:
    """The reduced gradient of each part, over the ranks that hold a copy of it and the number of dense replicas."""
    sums: dict[str, dict[tuple[int, ...], Tensor]] = {"cut": {}, "norm": {}, "expert": {}}
    for place in grid.places():
        of_part = {"cut": (place.tp,), "norm": (), "expert": (place.ep, place.etp)}
        for name, grad in gradients(place).items():
            if name == "norm" and place.tp:  # tensor-parallel copies have the same gradient
                continue
            before = sums[name].get(of_part[name])
            sums[name][of_part[name]] = grad if before is None else before + grad
    return {name: {part: total / grid.dp for part, total in parts.items()} for name, parts in sums.items()}


@pytest.mark.parametrize(("name", "sharding"), in_turn([*GRIDS], [*SHARDINGS]))
def test_each_gradient_is_reduced_once_and_counts_once(name: str, sharding: str) -> None:
    grid = GRIDS[name]
    expected = means(grid)
    norm = torch.stack([x.double().square().sum() for parts in expected.values() for x in parts.values()]).sum().sqrt()
    worlds: list[World] = []
    roles = thread_roles(grid, worlds)

    def rank_main(comm: Comm) -> None:
        place = grid.place(comm.rank)
        model = nn.Module()
        for kind, grad in gradients(place).items():
            model.register_parameter(kind, nn.Parameter(torch.zeros_like(grad)))
        vars(model.cut).update(tensor_model_parallel=grid.tp > 1, partition_dim=0)
        vars(model.expert).update(allreduce=False, tensor_model_parallel=grid.etp > 1, partition_dim=0)
        config = OptimizerConfig(
            optimizer="sgd", lr=1.0, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0, **SHARDINGS[sharding]
        )
        optimizer = get_optimizer(config, [model], {}, pg_collection=roles[comm.rank])
        for param, grad in zip(model.parameters(), gradients(place).values(), strict=True):
            param.grad = grad.clone()
        assert float(optimizer.step()[1]) == pytest.approx(float(norm), rel=1e-6)
        parts = {"cut": (place.tp,), "norm": (), "expert": (place.ep, place.etp)}
        for kind, part in parts.items():
            torch.testing.assert_close(-model.get_parameter(kind).detach(), expected[kind][part], rtol=1e-6, atol=0)

    try:
        run_threads(grid.size, rank_main)
    finally:
        for world in worlds:
            world.abort()
