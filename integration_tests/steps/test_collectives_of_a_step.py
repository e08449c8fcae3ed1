"""Collectives of a step: each gradient is reduced once, each parameter gathered once, and there is one small sum."""

from typing import Any

import pytest
from parity import SHAPES, SPREADS, config, step_once
from recording_comm import Call, RecordingComm

from opt_distributed import run_threads
from opt_distributed.comm.threads import ThreadComm
from opt_kernels.hooks import CautiousDecay, CentralizeGradient, ClipUpdateRms, RelativeUpdate
from opt_stack import Optimizer


def calls_of_a_step(spread: str, rule: str, hooks: Any = ()) -> tuple[list[Call], Optimizer]:
    """The collectives of a second step, on the first of two ranks."""

    def rank_main(comm: ThreadComm) -> tuple[list[Call], Optimizer]:
        recorded = RecordingComm(comm)
        made = step_once(config(optimizer=rule, **SPREADS[spread]), recorded, hooks=hooks)
        recorded.calls.clear()
        made.step()
        return recorded.calls, made

    return run_threads(2, rank_main)[0]


@pytest.mark.parametrize(
    ("spread", "rule"), [("replicated", "adam"), ("flat", "adam"), ("whole", "muon"), ("whole", "adam")]
)
def test_each_gradient_is_reduced_once_each_parameter_gathered_once_and_there_is_one_small_sum(
    spread: str, rule: str
) -> None:
    calls, optimizer = calls_of_a_step(spread, rule)
    buffers = [buffer.layout for buffer in optimizer.plan.buffers]
    numel, num_buckets = sum(layout.numel for layout in buffers), sum(len(layout.buckets) for layout in buffers)
    by_kind = {kind: [call.numel for call in calls if call.kind == kind] for kind in {call.kind for call in calls}}
    # Two norms; non-finite elements, zeros; flags of five guards; three of each group's numbers; whether
    # each parameter has a gradient.
    statistics = by_kind["all_reduce"].pop()
    assert statistics <= 9 + 3 * len(optimizer.param_groups) + len(SHAPES)
    # Of shards that differ in size, after a reduction and before a gather.
    exchanged = 2 * sum(bool(bucket.cuts) for layout in buffers for bucket in layout.buckets)
    assert len(by_kind.pop("all_to_all", ())) == exchanged
    if spread == "replicated":
        assert by_kind.keys() == {"all_reduce"}
        assert sum(by_kind["all_reduce"]) == numel
        return
    assert by_kind.pop("all_reduce") == []
    assert by_kind.keys() == {"reduce_scatter", "all_gather"}
    assert [(sum(sizes), len(sizes)) for sizes in by_kind.values()] == [(numel, num_buckets)] * 2


NORMS, CENTERS = (ClipUpdateRms(), RelativeUpdate()), (CentralizeGradient(),)


@pytest.mark.parametrize(
    ("hooks", "spread", "rule", "more"),
    [
        (NORMS, "flat", "adam", 1),
        ((CautiousDecay(),), "flat", "adam", 0),
        (NORMS, "replicated", "adam", 0),  # replicas hold whole parameters
        (NORMS, "whole", "muon", 1),  # of Adam's parameters
        (CENTERS, "flat", "adam", 1),
        ((*CENTERS, ClipUpdateRms()), "flat", "adam", 2),
        (CENTERS, "replicated", "adam", 0),
    ],
)
def test_norms_and_row_means_of_hooks_take_one_collective_where_parameters_are_cut(
    hooks: Any, spread: str, rule: str, more: int
) -> None:
    plain, found = ([call.kind for call in calls_of_a_step(spread, rule, given)[0]] for given in ((), hooks))
    assert sorted(found) == sorted([*plain, *["all_reduce"] * more])
