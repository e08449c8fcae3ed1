"""`check_for_nan_in_grad` on an accelerator: nothing is read in backward, all ranks have one verdict in the step."""

from functools import partial
from typing import Any

import pytest
import torch
from deferred_training import Config, Net, backward, batch
from fake_accelerator import DeferredRank, HostReadError, run_deferred
from torch import Tensor

from opt_distributed.buffers import grad_checks
from opt_distributed.buffers.binding import UnusableGradientError
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.comm.collectives import Alone
from opt_distributed.comm.device import HostCopy
from opt_distributed.comm.groups import Axes, Roles

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
    init = grad_checks.NonfiniteGrads.__init__

    def reading(check: Any, *args: Any, **kwargs: Any) -> None:
        init(check, *args, **kwargs)
        check._value.item()

    patch.setattr(grad_checks.NonfiniteGrads, "__init__", reading)


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
