"""Experts and dense parameters: expert, tensor and data parallelism together, and several optimizer instances.

Every world has the weights, norm and zero count of one process that holds everything. Threads.
"""

from itertools import product

import pytest
from experts import (
    EP,
    SPREADS,
    Place,
    Trained,
    assert_same,
    assert_step_of_one,
    config,
    grads_here,
    plain_or_wrapped,
    train,
    train_alone,
)
from tp_model import comms_of

from opt_distributed.comm.collectives import Alone
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import ThreadComm, run_threads


@plain_or_wrapped
@pytest.mark.parametrize("expert_replicas", [1, 2])
@pytest.mark.parametrize("spread", SPREADS)
def test_expert_and_tensor_parallel_ranks_have_the_step_of_one(
    spread: str, expert_replicas: int, wrapped: bool
) -> None:
    """EP 2 x TP 2: matrices of each expert are cut, its bias is on both tensor-parallel ranks."""
    assert_step_of_one(config(**SPREADS[spread]), expert_replicas, wrapped=wrapped)


@plain_or_wrapped
@pytest.mark.parametrize("own_totals", [False, True], ids=["totals over everyone", "totals of the instance"])
@pytest.mark.parametrize("expert_shards", [1, 2])
def test_experts_under_two_optimizer_instances_have_the_step_of_one(
    expert_shards: int, own_totals: bool, wrapped: bool
) -> None:
    """Shards inside an instance, copies between: of dense parameters over twice as many ranks as of an expert."""
    shards = EP * expert_shards  # ranks of an instance; shard s holds expert s % EP
    size = 2 * shards
    dp = comms_of([[shards * instance + s for s in range(shards)] for instance in range(2)])
    inter = comms_of([[s, shards + s] for s in range(shards)])
    expert_dp = comms_of(
        [[shards * i + s for s in range(shards) if s % EP == e] for i, e in product(range(2), range(EP))]
    )

    def rank_main(comm: ThreadComm) -> tuple[Place, Trained]:
        rank = comm.rank
        dense = Axes(dp=dp[rank], tp=Alone(), inter=inter[rank])
        expert = Axes(dp=expert_dp[rank], tp=Alone(), inter=inter[rank])
        roles = Roles(dense=dense, expert=expert, everyone=comm, instance=dp[rank] if own_totals else None)
        place = Place(Alone(), roles, (rank % EP,), rank, size)
        return place, train(made, place, lambda step: grads_here(step, place), wrapped=wrapped)

    made = config(use_distributed_optimizer=True)
    rows = {expert: [r for r in range(size) if r % EP == expert] for expert in range(EP)}
    assert_same(run_threads(size, rank_main), train_alone(made, size, rows))
