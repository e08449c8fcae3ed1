"""Collectives of a step: each gradient is reduced once, each parameter gathered once."""

import pytest
from parity import SHAPES, SPREADS, config, step_once
from recording_comm import Call, RecordingComm

from opt_distributed import run_threads
from opt_distributed.comm.threads import ThreadComm
from opt_stack import Optimizer


def calls_of_a_step(spread: str, *, optimizer: str = "adam") -> tuple[list[Call], Optimizer]:
    """The collectives of a second step, on the first of two ranks."""

    def rank_main(comm: ThreadComm) -> tuple[list[Call], Optimizer]:
        recorded = RecordingComm(comm)
        made = step_once(config(optimizer=optimizer, **SPREADS[spread]), recorded)
        recorded.calls.clear()
        made.step()
        return recorded.calls, made

    return run_threads(2, rank_main)[0]


@pytest.mark.parametrize(("spread", "rule"), [("flat", "adam"), ("whole", "muon"), ("whole", "adam")])
def test_each_gradient_is_reduced_once_each_parameter_gathered_once_and_there_is_one_small_sum(
    spread: str, rule: str
) -> None:
    calls, optimizer = calls_of_a_step(spread, optimizer=rule)
    in_buffers = sum(buffer.layout.numel for buffer in optimizer.plan.buffers)
    num_buckets = sum(len(buffer.layout.buckets) for buffer in optimizer.plan.buffers)
    kinds = [call.kind for call in calls]
    assert sum(call.numel for call in calls if call.kind == "reduce_scatter") == in_buffers
    assert sum(call.numel for call in calls if call.kind == "all_gather") == in_buffers
    assert (kinds.count("reduce_scatter"), kinds.count("all_gather")) == (num_buckets, num_buckets)
    (statistics,) = [call for call in calls if call.kind == "all_reduce"]
    # Two norms; non-finite elements, zeros; flags of five guards; three of each group's numbers; whether
    # each parameter has a gradient.
    assert statistics.numel <= 9 + 3 * len(optimizer.param_groups) + len(SHAPES)
    # Of shards that differ in size, after a reduction and before a gather.
    exchanged = 2 * sum(bool(bucket.cuts) for buffer in optimizer.plan.buffers for bucket in buffer.layout.buckets)
    assert kinds.count("all_to_all") == exchanged
    assert set(kinds) - {"all_to_all"} == {"reduce_scatter", "all_reduce", "all_gather"}


def test_a_replicated_step_sums_each_gradient_once_and_gathers_nothing() -> None:
    calls, optimizer = calls_of_a_step("replicated")
    *grads, statistics = calls
    assert {call.kind for call in calls} == {"all_reduce"}
    assert sum(call.numel for call in grads) == sum(buffer.layout.numel for buffer in optimizer.plan.buffers)
    assert statistics.numel <= 9 + 3 * len(optimizer.param_groups) + len(SHAPES)
