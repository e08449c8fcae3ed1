"""`check_for_large_grads`: the limit follows from the first iterations; all ranks have one verdict, in the step."""

import math
from typing import Any

import pytest
import torch
from recording_comm import RecordingComm
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig
from opt_distributed.buffers import grad_checks
from opt_distributed.buffers.binding import UnusableGradientError
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.comm.collectives import Alone, Comm
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import ThreadComm, World, run_threads

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
        for number in range(grad_checks.NUM_ITERATIONS):
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
    monkeypatch.setattr(grad_checks, "NUM_ITERATIONS", 2)


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


def test_a_bucket_sends_one_number_more_and_backward_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [(call.kind, call.numel) for call in recording.calls] == [("all_reduce", 1), ("all_reduce", 128)]
    ddp.finish_grad_sync()
