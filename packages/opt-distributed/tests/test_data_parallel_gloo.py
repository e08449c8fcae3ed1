"""The wrapped model over real processes: gloo agrees with one process, and a lost peer is an error that says where."""

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from data_parallel_net import OVERLAP, SHARDED, Config, Net, backward, batch, shard_of
from processes import join_world, new_meeting, run_processes, start
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.distributed_c10d import _set_pg_timeout

from opt_distributed import CollectiveError
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import ProcessGroups

SHORT_TIMEOUT_S = 1.0
NUM_ITERATIONS = 3


def descend(ddp: DistributedDataParallel) -> None:
    """A plain gradient step on what this rank owns, published as a step does."""
    for buffer in ddp.synced_buffers:
        for index in range(len(buffer.plan.layout.buckets)):
            rank = buffer.axes.dp.rank
            shard_of(buffer.memory, index, rank).add_(buffer.memory.result(index, rank), alpha=-0.1)
        buffer.place.publish_()


def largest_difference(config: Config, groups: ProcessGroups | None = None) -> float:
    """Between weights trained here and weights that one process trains on the joined batch."""
    size = dist.get_world_size()
    alone = Net()
    model = Net()
    ddp = DistributedDataParallel(config, model, groups=groups)
    for iteration in range(NUM_ITERATIONS):
        tokens = batch(iteration, 2 * size)
        alone.zero_grad()
        backward(alone(tokens).square().mean())
        for param in alone.parameters():
            assert param.grad is not None
            param.data.add_(param.grad, alpha=-0.1)
        backward(ddp(tokens.chunk(size)[dist.get_rank()]).square().mean())
        ddp.finish_grad_sync()
        descend(ddp)
        ddp.zero_grad_buffer()
    return max((a - b).abs().max().item() for a, b in zip(alone.parameters(), model.parameters(), strict=True))


def trains() -> dict[str, bool]:
    """Every way of reducing, over all ranks and over a grid of two instances."""
    size = dist.get_world_size()
    rank = dist.get_rank()
    rows = [dist.new_group([2 * i, 2 * i + 1]) for i in range(size // 2)]
    columns = [dist.new_group(list(range(j, size, 2))) for j in range(2)]
    world = dist.group.WORLD
    row = rows[rank // 2]
    groups = ProcessGroups(
        dp=world,
        expt_dp=world,
        mp=None,
        tp_ep_pp=None,
        intra_dp_cp=row,
        intra_expt_dp=row,
        intra_dist_opt=row,
        inter_dist_opt=columns[rank % 2],
    )
    instances = replace(OVERLAP, overlap_param_gather=False)
    instances.num_distributed_optimizer_instances = 2
    return {
        "overlap": largest_difference(OVERLAP) < 1e-12,
        # Sums are rounded to fp32: 2^-24 of gradients below 1, in three iterations, of which a tenth counts.
        "fp32 sums": largest_difference(replace(OVERLAP, reduce_scatter_with_fp32_accumulation=True)) < 1e-7,
        "in the step": largest_difference(replace(SHARDED, average_in_collective=True)) < 1e-12,
        "instances": largest_difference(instances, groups) < 1e-12,
    }


def meets_no_peer(rank: int, meeting: str, dies: bool) -> None:
    """Rank 1 goes missing after the first iteration; rank 0 must name what it waited for, which it writes to a file.

    The timeout is short only for the one collective that cannot complete.
    """
    join_world(rank, 2, meeting)
    ddp = DistributedDataParallel(OVERLAP, Net(), groups=None)
    backward(ddp(batch(0, 2)).square().mean())
    ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    dist.barrier()
    if rank == 1:
        if not dies:
            default_store().wait(["rank 0 has seen the error"])
        os._exit(0)
    if not dies:
        _set_pg_timeout(timedelta(seconds=SHORT_TIMEOUT_S), dist.group.WORLD)
    before = [param.detach().clone() for param in ddp.parameters()]
    try:
        backward(ddp(batch(0, 2)).square().mean())
        ddp.finish_grad_sync()
    except CollectiveError as error:
        unchanged = all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        Path(f"{meeting}.found").write_text(f"unchanged {unchanged}: {error}")
    default_store().set("rank 0 has seen the error", "")
    os._exit(0)  # the group is broken: no peer will answer its farewell


def test_four_processes_train_what_one_process_trains() -> None:
    want = ["overlap", "fp32 sums", "in the step", "instances"]
    assert run_processes(4, trains) == [dict.fromkeys(want, True)] * 4


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "never comes"])
def test_the_error_of_a_lost_peer_names_collective_and_step(dies: bool, tmp_path: Path) -> None:
    meeting = new_meeting(tmp_path)
    for process in [start(meets_no_peer, rank, meeting, dies) for rank in range(2)]:
        process.join(300)
        assert process.exitcode == 0
    found = Path(f"{meeting}.found").read_text()
    assert found.startswith("unchanged True: gradient reduction 2 of bucket ")
    assert "float64 dense, flat shards, float64 gradients: " in found
