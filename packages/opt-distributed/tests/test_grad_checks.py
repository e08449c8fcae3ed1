"""Checks of gradients before they are summed: infinite and NaN ones, and those much larger than the first hundred."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from data_parallel_net import Config, backward, of_axes, over
from fake_accelerator import DeferredRank, run_deferred
from recording_comm import RecordingComm
from tiers import NIGHT
from torch import nn

from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel, UnusableGradientError, bucket
from opt_distributed.comm import Alone, Axes, Comm
from opt_distributed.comm.threads import ThreadComm, World

ORDERS = range(6 if NIGHT else 2)
BAD_ITERATION = 1


def verdict(ddp: DistributedDataParallel) -> str:
    try:
        ddp.finish_grad_sync()
    except UnusableGradientError as error:
        return str(error)
    return ""


def run(rank: DeferredRank, *, value: float, instances: int = 1) -> list[str]:
    """The verdict of each of three iterations, the second of which has `value` in a gradient of the last rank."""
    size = rank.size // instances
    row = rank.rank // size * size
    inter = rank.comm_over(range(rank.rank % size, rank.size, size)) if instances > 1 else Alone()
    axes = Axes(dp=rank.comm_over(range(row, row + size)), tp=Alone(), inter=inter)
    config = Config(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=16, check_for_nan_in_grad=True
    )
    config.num_distributed_optimizer_instances = instances
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    ddp = DistributedDataParallel(config, net, groups=of_axes(axes, Alone()))
    found = []
    for iteration in range(3):
        with rank.device.host_reads_forbidden():
            loss = ddp(torch.ones(2, 4)).square().mean()
            if iteration == BAD_ITERATION and rank.rank == rank.size - 1:
                loss = loss + value * net[1].bias[2]
            backward(loss)
            found.append(verdict(ddp))
            ddp.zero_grad_buffer()
    return found


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("instances", [1, 2])
def test_every_rank_has_the_verdict_and_the_parameter_is_named(value: float, instances: int) -> None:
    for seed in ORDERS:
        *others, last = run_deferred(2 * instances, partial(run, value=value, instances=instances), seed=seed)
        assert last == ["", "gradients of 1.bias are not finite on this rank", ""]
        for before, bad, after in others:
            assert before == after == ""
            assert bad.startswith("gradients in bucket 1 of chunk 0, fp32 dense")
            assert bad.endswith("are not finite on another rank")


def test_large_finite_gradients_are_finite() -> None:
    """Squares of them are not."""
    assert run_deferred(2, partial(run, value=1e30), seed=0) == [["", "", ""]] * 2


SIZE = 16
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": SIZE}


def wrap(comm: Comm, across: Comm | None = None, **fields: Any) -> DistributedDataParallel:
    """A layer whose gradient is the input."""
    config = Config(check_for_large_grads=True, **fields)
    return DistributedDataParallel(config, nn.Linear(SIZE, 1, bias=False), groups=over(comm, across))


def iterate(ddp: DistributedDataParallel, value: float) -> str:
    """What an iteration raised, whose gradient is `value` everywhere."""
    backward(ddp(torch.full((1, SIZE), value)).sum())
    found = [verdict(ddp) for _ in range(2)]
    assert found[0] == found[1], "a second finish gives the same verdict"
    ddp.zero_grad_buffer()
    return found[0]


@pytest.mark.parametrize("fields", [{"check_for_nan_in_grad": True}, OVERLAP], ids=["in the step", "overlapping"])
def test_a_gradient_ten_times_the_first_hundred_is_refused(fields: dict[str, Any]) -> None:
    """On one rank only, after iterations of norm 4 and 8 there; the other rank's are smaller. What is not finite is not
    large, but refused on all ranks where that is checked."""

    def rank_main(comm: ThreadComm) -> list[str]:
        ddp = wrap(comm, **fields)
        factor = 1.0 if comm.rank == 1 else 0.5
        for number in range(bucket.NUM_ITERATIONS):
            assert iterate(ddp, factor * (2.0 if number == 50 else 1.0)) == ""
        values = [(0.5, 19.9), (0.5, 20.2), (0.5, 19.9), (math.nan, 1.0), (math.inf, 1.0)]
        return [iterate(ddp, pair[comm.rank]) for pair in values]

    expected = "unexpectedly large: their norm on a rank is 80.8, and 8 was the largest in the first 100 iterations"
    for before, large, fine, *not_finite in run_threads(2, rank_main):
        assert large.startswith("gradients in bucket 0 of chunk 0, fp32 dense, ")
        assert large.endswith(expected)
        assert before == fine == ""
        assert ["are not finite on" in said for said in not_finite] == ["check_for_nan_in_grad" in fields] * 2


def test_the_other_instances_hear_of_it() -> None:
    world = World(2)

    def rank_main(comm: ThreadComm) -> bool:
        across = ThreadComm(world, comm.rank)
        ddp = wrap(Alone(), across, use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
        assert not any(iterate(ddp, 1.0) for _ in range(bucket.NUM_ITERATIONS))
        return bool(iterate(ddp, 11.0 if comm.rank else 1.0))

    assert run_threads(2, rank_main) == [True, True]


def test_only_accepted_iterations_with_gradients_teach_the_limit() -> None:
    ddp = wrap(Alone())
    teaching = [0.0, 0.0, *[1.0] * (bucket.NUM_ITERATIONS - 1), 0.0, 2.0]
    accepted = [iterate(ddp, value) == "" for value in [*teaching, 0.0, 19.0]]
    assert all(accepted)
    assert [bool(iterate(ddp, value)) for value in (21.0, 21.0, 200.0, 19.0)] == [True, True, True, False]


def test_a_bucket_sends_two_numbers_more() -> None:
    recording = RecordingComm(Alone())
    ddp = wrap(recording, **OVERLAP)
    iterate(ddp, 1.0)
    recording.calls.clear()
    backward(ddp(torch.ones(1, SIZE)).sum())
    assert [(call.kind, call.numel) for call in recording.calls] == [("all_reduce", 2), ("all_reduce", 128)]
