"""The wrapped model over real processes: gloo agrees with one process, and a lost peer is an error that says where."""

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from data_parallel_net import shard_of
from processes import join_world, new_meeting, run_processes, start
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.distributed_c10d import _set_pg_timeout

from opt_config import DistributedDataParallelConfig
from opt_distributed import CollectiveError
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import ProcessGroups

SHORT_TIMEOUT_S = 1.0
NUM_ITERATIONS = 3
OVERLAP = DistributedDataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=100
)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(5))).to(torch.float64)


def samples(iteration: int, size: int) -> Tensor:
    return torch.randn(2 * size, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(iteration))


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def descend(ddp: DistributedDataParallel) -> None:
    """A plain gradient step on what this rank owns, published as a step does."""
    for buffer in ddp.synced_buffers:
        for index in range(len(buffer.plan.layout.buckets)):
            shard_of(buffer.memory, index, buffer.axes.dp.rank).add_(
                buffer.memory.result(index, buffer.axes.dp.rank), alpha=-0.1
            )
        buffer.publish_()


def largest_difference(
    config: DistributedDataParallelConfig, groups: ProcessGroups | None, *, compiled: bool = False
) -> float:
    """Between weights trained here and weights that one process trains on the joined batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    alone, model = make_model(), make_model()
    ddp = DistributedDataParallel(config, model, groups=groups)
    forward: Callable[[Tensor], Tensor] = ddp
    if compiled:
        for block in model.children():
            block.compile(backend="aot_eager")
        forward = torch.compile(ddp, backend="aot_eager")
    for iteration in range(NUM_ITERATIONS):
        x = samples(iteration, size)
        alone.zero_grad()
        backward(alone(x).square().mean())
        for param in alone.parameters():
            assert param.grad is not None
            param.data.add_(param.grad, alpha=-0.1)
        backward(forward(x.chunk(size)[rank]).square().mean())
        ddp.finish_grad_sync()
        descend(ddp)
        ddp.zero_grad_buffer()
    return max((a - b).abs().max().item() for a, b in zip(alone.parameters(), model.parameters(), strict=True))


def trains() -> dict[str, bool]:
    """Every way of reducing, over all ranks and over a grid of two instances."""
    size, rank = dist.get_world_size(), dist.get_rank()
    found = {"overlap": largest_difference(OVERLAP, None) < 1e-12}
    # Sums are rounded to fp32: 2^-24 of gradients below 1, in three iterations, of which a tenth counts.
    fp32 = replace(OVERLAP, reduce_scatter_with_fp32_accumulation=True)
    found["fp32 sums"] = largest_difference(fp32, None) < 1e-7
    plain = DistributedDataParallelConfig(use_distributed_optimizer=True, average_in_collective=True)
    found["in the step"] = largest_difference(plain, None) < 1e-12
    rows = [dist.new_group([2 * i, 2 * i + 1]) for i in range(size // 2)]
    columns = [dist.new_group(list(range(j, size, 2))) for j in range(2)]
    world, row = dist.group.WORLD, rows[rank // 2]
    groups = ProcessGroups(
        dp=world, expt_dp=world, mp=None, tp_ep_pp=None, intra_dp_cp=row, intra_expt_dp=row, intra_dist_opt=row,
        inter_dist_opt=columns[rank % 2],
    )  # fmt: skip
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, num_distributed_optimizer_instances=2, bucket_size=100
    )
    found["instances"] = largest_difference(config, groups) < 1e-12
    return found


def trains_compiled() -> float:
    """Overlap in both directions, with the blocks and the wrapper compiled."""
    return largest_difference(OVERLAP, None, compiled=True)


def meets_no_peer(rank: int, meeting: str, dies: bool) -> None:
    """Rank 1 goes missing after the first iteration; rank 0 must name what it waited for, which it writes to a file.

    The timeout is short only for the one collective that cannot complete.
    """
    join_world(rank, 2, meeting)
    ddp = DistributedDataParallel(OVERLAP, make_model(), groups=None)
    backward(ddp(samples(0, 1)).square().mean())
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
        backward(ddp(samples(0, 1)).square().mean())
        ddp.finish_grad_sync()
    except CollectiveError as error:
        unchanged = all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
        Path(f"{meeting}.found").write_text(f"unchanged {unchanged}: {error}")
    default_store().set("rank 0 has seen the error", "")
    os._exit(0)  # the group is broken: no peer will answer its farewell


def test_four_processes_train_what_one_process_trains() -> None:
    want = ["overlap", "fp32 sums", "in the step", "instances"]
    assert run_processes(4, trains) == [dict.fromkeys(want, True)] * 4


def test_compiled_code_trains_what_one_process_trains() -> None:
    assert max(run_processes(2, trains_compiled)) < 1e-12


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "never comes"])
def test_a_lost_peer_is_an_error_that_names_the_collective_and_the_step(dies: bool, tmp_path: Path) -> None:
    meeting = new_meeting(tmp_path)
    for process in [start(meets_no_peer, rank, meeting, dies) for rank in range(2)]:
        process.join(300)
        assert process.exitcode == 0
    found = Path(f"{meeting}.found").read_text()
    assert found.startswith("unchanged True: gradient reduction 2 of bucket ")
    assert "float64 dense, flat shards, float64 gradients: " in found
