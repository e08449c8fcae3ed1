"""Faults in the order of work, planted one by one: each gives wrong numbers in some of the first orders."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from deferred_training import Config, Program, are_equal, in_order, in_some_order, in_the_step, wrapped
from fake_accelerator import DeferredRank, run_deferred
from test_deferred_overlap import SHARDED, WHOLE
from torch import Tensor

from opt_distributed.buffers import ReducedGrads, reduced
from opt_distributed.buffers.bucket import GradBucket
from opt_distributed.buffers.param_sync import ParamBucket, ParamSync
from opt_distributed.buffers.reduced import Grads, _all_finished, _fill_
from opt_distributed.buffers.wires import InFlight, SumInFp32, SumToOwners, SumToShards
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import DONE, Pending
from opt_distributed.comm.device import HostCopy

NUM_ORDERS = 40

ONE = wrapped(Config(**SHARDED))
TWO_INSTANCES = wrapped(Config(**SHARDED, num_distributed_optimizer_instances=2))
OWNERS = wrapped(Config(**WHOLE), whole=True)
OWNERS_IN_INSTANCES = wrapped(Config(**WHOLE, num_distributed_optimizer_instances=2), whole=True)
IN_FP32 = wrapped(Config(**SHARDED, reduce_scatter_with_fp32_accumulation=True))

Patch = Callable[[pytest.MonkeyPatch], None]


def nobody_waits_for_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradBucket, "_land", lambda bucket: setattr(bucket, "_flight", None))


def nobody_waits_for_parameters(patch: pytest.MonkeyPatch) -> None:
    def forget(sync: ParamSync, bucket: ParamBucket) -> None:
        sync._incomplete.pop(bucket, None)
        sync.is_pending = bool(sync._incomplete)

    patch.setattr(ParamSync, "_wait_for", forget)


def a_stage_does_not_wait_for_the_one_before(patch: pytest.MonkeyPatch) -> None:
    def advance(flight: InFlight) -> None:
        flight._pending = flight._next()

    patch.setattr(InFlight, "advance", advance)


def the_side_stream_does_not_wait_for_gradients(patch: pytest.MonkeyPatch) -> None:
    def queue_all(flight: InFlight) -> None:
        side = flight._device.side_stream()
        with flight._device.on(side):
            flight._pending = flight._next()
            while flight._pending is not None:
                flight.advance()
        flight._done = side.record_event()

    patch.setattr(InFlight, "_queue_all", queue_all)


def nobody_waits_for_the_side_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InFlight, "finish", lambda flight: None)


def scratch_of_another_stream(patch: pytest.MonkeyPatch) -> None:
    """It is given back to the compute stream, whose next work may take it while the side stream still reads it."""
    _allocate_on_compute(patch, SumInFp32)


def a_chunk_of_another_stream(patch: pytest.MonkeyPatch) -> None:
    _allocate_on_compute(patch, SumToOwners)


def an_exchange_does_not_wait_for_sums(patch: pytest.MonkeyPatch) -> None:
    """The chunk's reduction over instances, on another group's stream, is still running when it is sent."""
    stages = SumToShards.stages

    def ignored(wire: SumToShards, full: Tensor, shard: Tensor) -> Iterator[Pending]:
        first, *others = stages(wire, full, shard)
        yield first
        yield from (DONE for _ in others)

    patch.setattr(SumToShards, "stages", ignored)


def _allocate_on_compute(patch: pytest.MonkeyPatch, kind: type[SumInFp32] | type[SumToOwners]) -> None:
    stages = kind.stages

    def with_scratch(wire: Any, full: Tensor, shard: Tensor) -> Iterator[Pending]:
        device = devices.device_of(full.device)
        empty_like = torch.empty_like

        def on_compute(tensor: Tensor) -> Tensor:
            with device.on(device._compute):  # type: ignore[attr-defined]
                return empty_like(tensor)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch, "empty_like", on_compute)
            yield from stages(wire, full, shard)

    patch.setattr(kind, "stages", with_scratch)


def a_bucket_is_given_back_before_its_reduction_is_done(patch: pytest.MonkeyPatch) -> None:
    def reduce_(shards: ReducedGrads, grads: Grads) -> None:
        flights = []
        for index, places in enumerate(shards._places):
            with shards._scratch_memory():
                _fill_(places, grads)
                flights.append(shards._start(index))
        for flight in flights:
            flight.finish()

    patch.setattr(ReducedGrads, "reduce_", reduce_)


def a_bucket_is_filled_while_the_one_before_it_is_on_the_wire(patch: pytest.MonkeyPatch) -> None:
    def reduce_(shards: ReducedGrads, grads: Grads) -> None:
        with shards._scratch_memory(), _all_finished() as flights:
            for index, places in enumerate(shards._places):
                _fill_(places, grads)
                flights.append(shards._start(index))

    patch.setattr(ReducedGrads, "reduce_", reduce_)


def nobody_waits_for_the_last_buckets(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def unfinished() -> Iterator[deque[InFlight]]:
        yield deque()

    patch.setattr(reduced, "_all_finished", unfinished)


FAULTS: dict[str, tuple[Patch, Program, int]] = {
    "nobody waits for gradients": (nobody_waits_for_gradients, ONE, 1),
    "nobody waits for parameters": (nobody_waits_for_parameters, ONE, 1),
    "a stage does not wait for the one before": (a_stage_does_not_wait_for_the_one_before, TWO_INSTANCES, 2),
    "sums in fp32 do not wait for what they add": (a_stage_does_not_wait_for_the_one_before, IN_FP32, 1),
    "owners do not wait for sums over instances": (an_exchange_does_not_wait_for_sums, OWNERS_IN_INSTANCES, 2),
    "nobody waits for the exchange": (nobody_waits_for_the_side_stream, OWNERS, 1),
    "a chunk of another stream": (a_chunk_of_another_stream, OWNERS, 1),
    "the side stream does not wait for gradients": (the_side_stream_does_not_wait_for_gradients, IN_FP32, 1),
    "nobody waits for the side stream": (nobody_waits_for_the_side_stream, TWO_INSTANCES, 2),
    "scratch of another stream": (scratch_of_another_stream, IN_FP32, 1),
    "a bucket is given back too early": (a_bucket_is_given_back_before_its_reduction_is_done, in_the_step, 1),
    "a bucket is filled too early": (a_bucket_is_filled_while_the_one_before_it_is_on_the_wire, in_the_step, 1),
    "a bucket of instances is filled too early": (
        a_bucket_is_filled_while_the_one_before_it_is_on_the_wire,
        in_the_step,
        2,
    ),
    "nobody waits for the last buckets": (nobody_waits_for_the_last_buckets, in_the_step, 1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_order_of_work_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, program, instances = FAULTS[name]
    expected = in_order(program, instances=instances)
    assert are_equal(in_some_order(program, seed=0, instances=instances), expected)
    plant(monkeypatch)
    assert any(
        not are_equal(in_some_order(program, seed=seed, instances=instances), expected) for seed in range(NUM_ORDERS)
    )


def read_on_host(one: DeferredRank) -> list[float]:
    """Reads a result while the device goes on to overwrite the tensor."""
    x = torch.ones(3)
    x.add_(1.0)
    copy = HostCopy(x, one.device)
    x.zero_()
    values: list[float] = copy.wait().tolist()
    return values


def test_a_copy_for_the_host_has_the_values_of_its_place_in_the_stream() -> None:
    assert all(run_deferred(1, read_on_host, seed=seed) == [[2.0] * 3] for seed in range(NUM_ORDERS))


def test_a_host_read_of_unfinished_data_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCopy, "wait", lambda copy: copy._copy)
    assert any(run_deferred(1, read_on_host, seed=seed) != [[2.0] * 3] for seed in range(NUM_ORDERS))
