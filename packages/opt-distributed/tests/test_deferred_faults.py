"""Faults in the order of work, planted one by one: each gives wrong numbers in some of the first orders."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from deferred_training import SHARDED, WHOLE, Config, Program, are_equal, in_order, in_some_order, in_the_step, wrapped
from fake_accelerator import queues
from torch import Tensor

from opt_distributed.buffers.bucket import GradBucket
from opt_distributed.buffers.param_sync import ParamBucket, ParamSync
from opt_distributed.buffers.wires import InFlight, SumInFp32, SumToOwners
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import Pending

NUM_ORDERS = 40

SHARDS = wrapped(Config(**SHARDED))
INSTANCES = wrapped(Config(**SHARDED, num_distributed_optimizer_instances=2))
OWNERS = wrapped(Config(**WHOLE), whole=True)
IN_FP32 = wrapped(Config(**SHARDED, reduce_scatter_with_fp32_accumulation=True))

Patch = Callable[[pytest.MonkeyPatch], None]


def nobody_waits_for_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradBucket, "_land", lambda bucket: setattr(bucket, "_flight", None))


def nobody_waits_for_parameters(patch: pytest.MonkeyPatch) -> None:
    def forget(sync: ParamSync, bucket: ParamBucket) -> None:
        sync._incomplete.pop(bucket, None)
        sync.is_pending = bool(sync._incomplete)

    patch.setattr(ParamSync, "_wait_for", forget)


def a_stage_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InFlight, "advance", InFlight._next)


def the_side_stream_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    wait = queues.Queue.wait_event
    patch.setattr(queues.Queue, "wait_event", lambda queue, event: None if queue.name == "side" else wait(queue, event))


def nobody_waits_for_a_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InFlight, "finish", lambda flight: None)


def scratch_of_another_stream(kind: type[SumInFp32] | type[SumToOwners]) -> Patch:
    """It is given back to the compute stream, whose next work may take it while the side stream still reads it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        stages, empty_like = kind.stages, torch.empty_like

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


FAULTS: dict[str, tuple[Patch, Program, int]] = {  # how to plant it; in which program, of how many instances
    "nobody waits for gradients": (nobody_waits_for_gradients, SHARDS, 1),
    "nobody waits for parameters": (nobody_waits_for_parameters, SHARDS, 1),
    "a stage does not wait for the one before": (a_stage_does_not_wait, INSTANCES, 2),
    "sums in fp32 do not wait for what they add": (a_stage_does_not_wait, IN_FP32, 1),
    "nobody waits for the side stream": (nobody_waits_for_a_flight, INSTANCES, 2),
    "the side stream does not wait for gradients": (the_side_stream_does_not_wait, IN_FP32, 1),
    "scratch of another stream": (scratch_of_another_stream(SumInFp32), IN_FP32, 1),
    "a chunk of another stream": (scratch_of_another_stream(SumToOwners), OWNERS, 1),
    "a bucket is filled and freed too early": (nobody_waits_for_a_flight, in_the_step, 1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_order_of_work_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, program, instances = FAULTS[name]
    expected = in_order(program, instances=instances)
    assert are_equal(in_some_order(program, seed=0, instances=instances), expected)
    plant(monkeypatch)
    found = (in_some_order(program, seed=seed, instances=instances) for seed in range(NUM_ORDERS))
    assert any(not are_equal(each, expected) for each in found)
