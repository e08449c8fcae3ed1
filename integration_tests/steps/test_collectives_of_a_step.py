"""Collectives of a step: each gradient is reduced once, each parameter gathered once; and the memory of a rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layouts import SPREADS, config, step_once
from parity import SHAPES, Net, grads_of, roles_over
from recording_comm import Call, RecordingComm
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm
from opt_stack import Optimizer, get_optimizer


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
    exchanged = 2 * sum(bool(bucket.cuts) for buffer in optimizer.plan.buffers for bucket in buffer.layout.buckets)
    assert (
        kinds.count("all_to_all") == exchanged
    )  # of shards that differ in size, after a reduction and before a gather
    assert set(kinds) - {"all_to_all"} == {"reduce_scatter", "all_reduce", "all_gather"}


def test_a_replicated_step_sums_each_gradient_once_and_gathers_nothing() -> None:
    calls, optimizer = calls_of_a_step("replicated")
    *grads, statistics = calls
    assert {call.kind for call in calls} == {"all_reduce"}
    assert sum(call.numel for call in grads) == sum(buffer.layout.numel for buffer in optimizer.plan.buffers)
    assert statistics.numel <= 9 + 3 * len(optimizer.param_groups) + len(SHAPES)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_flat_ranks_state_is_its_share_to_a_percent(size: int) -> None:
    """12 million parameters: AdamW's fp32 moments of bf16 parameters, and fp32 mains."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(11)), nn.Linear(1024, 500)).to(torch.bfloat16)
    numel = sum(p.numel() for p in model.parameters())
    assert numel > 10_000_000

    class Pretended(Alone):
        """One rank of a group that plans but does not step."""

        def gather_objects(self, value: Any) -> list[Any]:
            return [value] * size

    pretended: Any = Pretended()
    pretended.size = size
    axes = Axes(dp=pretended, tp=Alone())
    roles = Roles(dense=axes, expert=axes, everyone=Alone())
    optimizer = get_optimizer(config(bf16=True, use_distributed_optimizer=True), [model], {}, pg_collection=roles)
    for rank in range(size):
        assert optimizer.plan.state_bytes(rank) == pytest.approx(12 * numel / size, rel=0.01)
    (unit,) = optimizer.stepper.units
    assert unit.state_bytes() == optimizer.plan.state_bytes(0)
    (buffer,) = optimizer.plan.buffers
    assert buffer.layout.numel < 1.01 * numel


# --- several chunks --------------------------------------------------------------------------------------------------


def two_chunks(roles: Roles, *, first_early: bool) -> tuple[list[nn.Module], Optimizer]:
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=10**6
    )
    chunks: list[nn.Module] = [
        DistributedDataParallel(ddp, Net(torch.float32), groups=roles, chunk=chunk) for chunk in range(2)
    ]
    overlaps = config(
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        overlap_param_gather_with_optimizer_step=first_early,
    )
    return chunks, get_optimizer(overlaps, chunks, {}, pg_collection=roles)


def train_chunks(roles: Roles, watch: Callable[[Optimizer], None] = lambda optimizer: None, **how: Any) -> list[Tensor]:
    chunks, optimizer = two_chunks(roles, **how)
    watch(optimizer)
    for step in range(2):
        for chunk in chunks:
            chunk(grads_of(step, roles.everyone.rank, roles.everyone.size)).backward()
        assert optimizer.step().success
        for chunk in chunks:
            chunk.zero_grad_buffer()
    for chunk in chunks:
        chunk.finish_param_sync()
    return [p.detach().clone() for chunk in chunks for p in chunk.parameters()]


def test_the_first_chunks_gather_starts_before_the_others_are_stepped() -> None:
    """overlap_param_gather_with_optimizer_step: another order of the same work, so the same bits."""

    def rank_main(comm: ThreadComm) -> tuple[list[str], list[Tensor]]:
        events: list[str] = []
        recorded = RecordingComm(comm)

        def watch(optimizer: Optimizer) -> None:
            for unit in optimizer.stepper.units:
                unit.rule = NotingRule(unit.rule, unit.name, events, recorded)

        weights = train_chunks(roles_over(recorded), watch, first_early=True)
        return events, weights

    late = run_threads(2, lambda comm: train_chunks(roles_over(comm), first_early=False))
    for (events, early), plain in zip(run_threads(2, rank_main), late, strict=True):
        assert events == ["adam after 0 gathers", "adam/later chunks after 1 gathers"] * 2
        assert all(torch.equal(a, b) for a, b in zip(early, plain, strict=True))


class NotingRule:
    """A rule that notes how many gathers were issued since the step began when it is called."""

    def __init__(self, rule: Any, name: str, events: list[str], comm: RecordingComm):
        self._rule, self._name, self._events, self._comm = rule, name, events, comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def update_(self, *args: Any, **kwargs: Any) -> None:
        last = max(i for i, call in enumerate(self._comm.calls) if call.kind == "all_reduce")  # the statistics
        gathers = sum(call.kind == "all_gather" for call in self._comm.calls[last:])
        self._events.append(f"{self._name} after {gathers} gathers")
        self._rule.update_(*args, **kwargs)
