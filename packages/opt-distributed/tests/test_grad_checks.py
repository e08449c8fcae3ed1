"""Checks of gradients before they are summed: infinite and NaN ones, and those much larger than the first hundred."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from deferred_training import Config, Net, backward, batch
from fake_accelerator import DeferredRank, HostReadError, run_deferred
from recording_comm import RecordingComm
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel, UnusableGradientError, bucket
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_distributed.comm.device import HostCopy
from opt_distributed.comm.threads import ThreadComm, World

ORDERS = range(6)
CONFIG = Config(
    use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=16, check_for_nan_in_grad=True,
    average_in_collective=False,
)  # fmt: skip
BAD_ITERATION = 1


def run(one: DeferredRank, *, value: float, instances: int = 1) -> list[str]:
    """The verdict of each of three iterations, the second of which has `value` in a gradient of the last rank."""
    size = one.size // instances
    row = one.rank // size * size
    dp = one.comm_over(range(row, row + size))
    inter = one.comm_over(range(one.rank % size, one.size, size)) if instances > 1 else Alone()
    axes = Axes(dp=dp, tp=Alone(), inter=inter)
    config = Config(**{**vars(CONFIG), "num_distributed_optimizer_instances": instances})
    net = Net()
    ddp = DistributedDataParallel(config, net, groups=Roles(dense=axes, expert=axes, everyone=Alone()))
    found = []
    for iteration in range(3):
        with one.device.host_reads_forbidden():
            loss = ddp(batch(iteration, one.rank)).square().mean()
            if iteration == BAD_ITERATION and one.rank == one.size - 1:
                loss = loss + value * net.layers[1].bias[2]
            backward(loss)
            found.append(verdict(ddp))
            ddp.zero_grad_buffer()
    return found


def verdict(ddp: DistributedDataParallel) -> str:
    try:
        ddp.finish_grad_sync()
    except UnusableGradientError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("instances", [1, 2])
def test_every_rank_has_the_verdict_and_the_parameter_is_named(value: float, instances: int) -> None:
    for seed in ORDERS:
        *others, last = run_deferred(2 * instances, partial(run, value=value, instances=instances), seed=seed)
        assert last == ["", "gradients of layers.1.bias are not finite on this rank", ""]
        for other in others:
            assert other[0] == other[2] == ""
            assert other[1].startswith("gradients in bucket 1 of chunk 0, fp32 dense")
            assert other[1].endswith("are not finite on another rank")


def test_large_finite_gradients_are_finite() -> None:
    """Squares of them are not."""
    for found in run_deferred(2, partial(run, value=1e30), seed=0):
        assert found == ["", "", ""]


def it_is_read_in_backward(patch: pytest.MonkeyPatch) -> None:
    init = bucket.GradChecks.__init__

    def reading(check: Any, *args: Any, **kwargs: Any) -> None:
        init(check, *args, **kwargs)
        check._largest[0].item()

    patch.setattr(bucket.GradChecks, "__init__", reading)


def the_verdict_is_read_too_early(patch: pytest.MonkeyPatch) -> None:
    def init(copy: HostCopy, tensor: Tensor, device: Any) -> None:
        copy._copy, copy._event = device.pinned_like(tensor), None
        copy._copy.copy_(tensor, non_blocking=True)

    patch.setattr(HostCopy, "__init__", init)


@pytest.mark.parametrize("plant", [it_is_read_in_backward, the_verdict_is_read_too_early])
def test_a_fault_is_noticed(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_deferred(2, partial(run, value=torch.nan), seed=0)
    plant(monkeypatch)

    def is_noticed(seed: int) -> bool:
        try:
            return run_deferred(2, partial(run, value=torch.nan), seed=seed) != expected
        except HostReadError:
            return True

    assert any(is_noticed(seed) for seed in range(20))


SIZE = 16
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": SIZE}


class Layer(nn.Linear):
    """Its gradient is the input."""

    def __init__(self) -> None:
        super().__init__(SIZE, 1, bias=False)


def wrap(comm: Comm, across: Comm | None = None, **fields: Any) -> DistributedDataParallel:
    axes = Axes(dp=comm, tp=Alone(), inter=across or Alone())
    config = DistributedDataParallelConfig(check_for_large_grads=True, **fields)
    return DistributedDataParallel(config, Layer(), groups=Roles(dense=axes, expert=axes, everyone=comm))


def iterate(ddp: DistributedDataParallel, value: float) -> str:
    """What an iteration raised, whose gradient is `value` everywhere."""
    ddp(torch.full((1, SIZE), value)).sum().backward()
    try:
        ddp.finish_grad_sync()
    except UnusableGradientError as error:
        return str(error)
    finally:
        ddp.zero_grad_buffer()
    return ""


@pytest.mark.parametrize("fields", [{}, OVERLAP], ids=["in the step", "overlapping"])
def test_a_gradient_ten_times_the_first_hundred_is_refused(fields: dict[str, Any]) -> None:
    """On one rank only, after iterations of norm 4 and 8 there; the other rank's are smaller."""

    def rank_main(comm: ThreadComm) -> list[str]:
        ddp = wrap(comm, **fields)
        factor = 1.0 if comm.rank == 1 else 0.5
        for number in range(bucket.NUM_ITERATIONS):
            assert iterate(ddp, factor * (2.0 if number == 50 else 1.0)) == ""
        values = [(0.5, 19.9), (0.5, 20.2), (0.5, 19.9), (math.nan, 1.0), (math.inf, 1.0)]
        return [iterate(ddp, pair[comm.rank]) for pair in values]

    expected = "unexpectedly large: their norm on a rank is 80.8, and 8 was the largest in the first 100 iterations"
    for before, large, *after in run_threads(2, rank_main):
        assert large.startswith("gradients in bucket 0 of chunk 0, fp32 dense, ")
        assert large.endswith(expected)
        assert [before, *after] == [""] * 4


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "NUM_ITERATIONS", 2)


@pytest.mark.usefixtures("short")
def test_the_other_instances_hear_of_it() -> None:
    world = World(2)

    def rank_main(comm: ThreadComm) -> list[str]:
        across = ThreadComm(world, comm.rank)
        ddp = wrap(Alone(), across, use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
        return [iterate(ddp, value if comm.rank else 1.0)[:20] for value in (1.0, 1.0, 11.0)]

    assert run_threads(2, rank_main) == [["", "", "gradients in bucket "]] * 2


@pytest.mark.usefixtures("short")
def test_iterations_without_a_gradient_teach_nothing() -> None:
    ddp = wrap(Alone())
    found = [iterate(ddp, value) for value in (0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 9.0)]
    assert found == [""] * 8
    assert iterate(ddp, 11.0) != ""


@pytest.mark.usefixtures("short")
def test_a_refused_iteration_does_not_raise_the_limit() -> None:
    ddp = wrap(Alone())
    assert [iterate(ddp, value) for value in (1.0, 1.0)] == ["", ""]
    assert all(iterate(ddp, value) for value in (11.0, 11.0, 200.0))


@pytest.mark.usefixtures("short")
def test_a_second_finish_gives_the_same_verdict_and_learns_nothing() -> None:
    ddp = wrap(Alone())
    for value, is_large in ((1.0, False), (50.0, False), (501.0, True)):
        ddp(torch.full((1, SIZE), value)).sum().backward()
        for _ in range(2):
            if is_large:
                with pytest.raises(UnusableGradientError, match="unexpectedly large"):
                    ddp.finish_grad_sync()
            else:
                ddp.finish_grad_sync()
        ddp.zero_grad_buffer()


def test_a_bucket_sends_two_numbers_more_and_backward_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = RecordingComm(Alone())
    ddp = wrap(recording, **OVERLAP)
    iterate(ddp, 1.0)
    recording.calls.clear()

    def refuse(tensor: Tensor) -> float:
        raise AssertionError("the host read a tensor in backward")

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "item", refuse)
        patch.setattr(Tensor, "tolist", refuse)
        ddp(torch.ones(1, SIZE)).sum().backward()
    assert [(call.kind, call.numel) for call in recording.calls] == [("all_reduce", 2), ("all_reduce", 128)]
    ddp.finish_grad_sync()
