"""The wrapper on devices that run their work later: the same bits in every legal order, and others after a fault.

More orders at night.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from data_parallel_net import LAYER_WISE, Config, backward, grid, of_axes
from fake_accelerator import DeferredRank, queues, run_deferred
from tiers import NIGHT
from torch import Tensor, nn

from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.buffers.bucket import GradBucket
from opt_distributed.buffers.param_sync import ParamBucket, ParamSync
from opt_distributed.buffers.wires import InFlight, SumInFp32, SumToOwners
from opt_distributed.comm import Alone, Axes
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import Pending
from opt_distributed.comm.threads import ThreadComm

NUM_ORDERS = 50 if NIGHT else 2
NUM_STEPS = 3
Program = Callable[[Axes], list[Tensor]]
Ranks = list[list[Tensor]]


class Net(nn.Module):
    """Three buckets or more: of whole parameters, one of two ranks owns four vectors and the other a matrix."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(3)
        shapes = [(16, 4), (1, 16), (1, 16), (1, 16), (1, 16)] * 3
        self.values = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=numbers)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for at in range(0, len(self.values), 5):
            weight, a, b, c, d = self.values[at : at + 5]
            x = (torch.tanh(x @ weight.T * a + b) * c + d)[:, :4]
        return x


def wrapped(fields: dict[str, Any], *, whole: bool = False, num_microbatches: int = 1, **others: Any) -> Program:
    """Train a wrapped model by plain gradient descent; `whole`: no parameter is cut, and shards differ in size."""
    config = Config(bucket_size=128, **fields, **others)

    def train(axes: Axes) -> list[Tensor]:
        net = Net()
        of_optimizer = LAYER_WISE if whole else None
        ddp = DistributedDataParallel(config, net, groups=of_axes(axes, Alone()), optimizer_config=of_optimizer)
        assert {bool(bucket.cuts) for bucket in ddp.synced_buffers[0].plan.layout.buckets} == {whole}

        def loss_of(batch: int) -> Tensor:
            numbers = torch.Generator().manual_seed(10 * batch + axes.inter.rank * axes.dp.size + axes.dp.rank)
            loss: Tensor = ddp(torch.randn(2, 4, generator=numbers)).square().mean()
            return loss

        for step in range(NUM_STEPS):
            with ddp.no_sync():
                for number in range(1, num_microbatches):
                    backward(loss_of(step + number * NUM_STEPS))
            backward(loss_of(step))
            ddp.finish_grad_sync()
            with torch.no_grad():
                for buffer in ddp.synced_buffers:
                    for piece in buffer.owned():
                        flat = buffer.params[piece.id].view(-1)[piece.of_param]
                        flat.sub_(buffer.grad(piece.id, piece.of_param).reshape(-1), alpha=0.5)
                    buffer.place.publish_()
            ddp.zero_grad_buffer()
        ddp.finish_param_sync()
        largest = [torch.tensor(family.limit.largest) for family in ddp.grad_sync.families]
        return [param.detach().clone() for param in net.parameters()] + largest

    return train


def in_order(program: Program, *, instances: int = 1) -> Ranks:
    """What the program computes where every operation is done when it returns."""
    worlds = grid()

    def rank_main(comm: ThreadComm) -> list[Tensor]:
        return program(worlds(comm.rank) if instances > 1 else Axes(dp=comm, tp=Alone()))

    return run_threads(2 * instances, rank_main)


def in_some_order(program: Program, *, seed: int, instances: int = 1) -> Ranks:
    """What it computes on devices that run their work later."""

    def rank_main(rank: DeferredRank) -> list[Tensor]:
        instance, shard = divmod(rank.rank, 2)
        inter = rank.comm_over(range(shard, 2 * instances, 2)) if instances > 1 else Alone()
        return program(Axes(dp=rank.comm_over((2 * instance, 2 * instance + 1)), tp=Alone(), inter=inter))

    return run_deferred(2 * instances, rank_main, seed=seed)


def are_equal(found: Ranks, expected: Ranks) -> bool:
    """Bit by bit, on all ranks."""
    return all(torch.equal(x, y) for a, b in zip(found, expected, strict=True) for x, y in zip(a, b, strict=True))


OVERLAP = {"overlap_grad_reduce": True}
SHARDED = {**OVERLAP, "use_distributed_optimizer": True, "overlap_param_gather": True}
INSTANCES = {"num_distributed_optimizer_instances": 2}
FP32 = {"reduce_scatter_with_fp32_accumulation": True}
PROGRAMS: dict[str, Program] = {  # of two optimizer instances if its name says so
    "replicated": wrapped(OVERLAP),
    "sharded": wrapped(SHARDED),
    "sharded, microbatches": wrapped(SHARDED, num_microbatches=2),
    "sharded, instances": wrapped(SHARDED, **INSTANCES),
    "sharded, sums in fp32": wrapped(SHARDED, **FP32),
    "sharded, checked": wrapped(SHARDED, check_for_nan_in_grad=True, check_for_large_grads=True),
    "instances, checked for large gradients": wrapped(SHARDED, check_for_large_grads=True, **INSTANCES),
    "sharded, aligned": wrapped(SHARDED, align_param_gather=True),
    "whole": wrapped(SHARDED, whole=True),
    "whole, instances": wrapped(SHARDED, whole=True, **INSTANCES),
    "whole, sums in fp32": wrapped(SHARDED, whole=True, **FP32),
    "whole, aligned": wrapped(SHARDED, whole=True, align_param_gather=True),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_order_of_queued_work_gives_the_same_bits(name: str) -> None:
    program = PROGRAMS[name]
    instances = 2 if "instances" in name else 1
    expected = in_order(program, instances=instances)
    for seed in range(NUM_ORDERS):
        assert are_equal(in_some_order(program, seed=seed, instances=instances), expected), f"seed {seed}"


@pytest.mark.parametrize("instances", [1, 2])
def test_owners_of_whole_params_train_like_owners_of_shards(instances: int) -> None:
    programs = (PROGRAMS[kind + (", instances" if instances > 1 else "")] for kind in ("whole", "sharded"))
    torch.testing.assert_close(*(in_order(program, instances=instances) for program in programs))


# --- faults in the order of work, planted one by one: each gives wrong numbers in some of the first orders ------------

Patch = Callable[[pytest.MonkeyPatch], None]


def nobody_waits_for_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradBucket, "_on_arrival", lambda bucket: setattr(bucket, "_flight", None))


def nobody_waits_for_parameters(patch: pytest.MonkeyPatch) -> None:
    def forget(sync: ParamSync, bucket: ParamBucket) -> None:
        sync._incomplete.pop(bucket, None)
        sync.is_pending = bool(sync._incomplete)

    patch.setattr(ParamSync, "_wait_for", forget)


def a_stage_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InFlight, "_next", lambda flight: setattr(flight, "_pending", next(flight._stages, None)))


def the_side_stream_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    wait = queues.Queue.wait_event
    patch.setattr(queues.Queue, "wait_event", lambda queue, event: None if queue.name == "side" else wait(queue, event))


def nobody_waits_for_a_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InFlight, "finish", lambda flight: None)


def scratch_of_another_stream(kind: type[SumInFp32] | type[SumToOwners]) -> Patch:
    """It is given back to the compute stream, whose next work may take it while the side stream still reads it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        stages = kind.stages
        empty_like = torch.empty_like

        def with_scratch(wire: Any, full: Tensor, shard: Tensor) -> Iterator[Pending]:
            device = devices.device_of(full.device)

            def on_compute(tensor: Tensor) -> Tensor:
                with device.on(device._compute):  # type: ignore[attr-defined]
                    return empty_like(tensor)

            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(torch, "empty_like", on_compute)
                yield from stages(wire, full, shard)

        patch.setattr(kind, "stages", with_scratch)

    return plant


FAULTS: dict[str, tuple[Patch, str]] = {  # how to plant it, and in which program
    "nobody waits for gradients": (nobody_waits_for_gradients, "sharded"),
    "nobody waits for parameters": (nobody_waits_for_parameters, "sharded"),
    "a stage does not wait for the one before": (a_stage_does_not_wait, "sharded, instances"),
    "sums in fp32 do not wait for what they add": (a_stage_does_not_wait, "sharded, sums in fp32"),
    "nobody waits for the side stream": (nobody_waits_for_a_flight, "sharded, instances"),
    "the side stream does not wait for gradients": (the_side_stream_does_not_wait, "sharded, sums in fp32"),
    "scratch of another stream": (scratch_of_another_stream(SumInFp32), "sharded, sums in fp32"),
    "a chunk of another stream": (scratch_of_another_stream(SumToOwners), "whole"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_order_of_work_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, program = FAULTS[name]
    instances = 2 if "instances" in program else 1
    expected = in_order(PROGRAMS[program], instances=instances)
    plant(monkeypatch)
    found = (in_some_order(PROGRAMS[program], seed=seed, instances=instances) for seed in range(40))
    assert any(not are_equal(each, expected) for each in found)
