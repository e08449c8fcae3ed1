"""Overlap: in what order collectives are issued, how much of them compute hides, and that nothing is used too early.

Time here is a number that layers and collectives advance, not a clock: the figures are exact and the same everywhere.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from data_parallel_net import bucket_of, shard_of
from delayed_comm import DELAY, DelayedComm, Timeline, publish
from recording_comm import RecordingComm
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.threads import ThreadComm

WIDTH = 16
NUM_LAYERS = 12
FORWARD, BACKWARD = 1.0, 2.0


class Timed(torch.autograd.Function):
    """Advances a timeline, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, timeline: Timeline, name: str) -> Tensor:
        ctx.timeline, ctx.name = timeline, name
        timeline.compute(f"forward {name}", FORWARD)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.timeline.compute(f"backward {ctx.name}", BACKWARD)
        return grads[0], None, None


class Layer(nn.Module):
    """A linear layer that takes time."""

    def __init__(self, timeline: Timeline, name: str):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.timeline, self.name = timeline, name

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Timed.apply(x @ self.weight, self.timeline, self.name)  # type: ignore[no-untyped-call]
        return y


CONFIG = DistributedDataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=WIDTH * WIDTH
)


def wrap(timeline: Timeline, config: DistributedDataParallelConfig = CONFIG) -> DistributedDataParallel:
    model = nn.Sequential(*(Layer(timeline, str(index)) for index in range(NUM_LAYERS)))
    axes = Axes(dp=DelayedComm(timeline), tp=Alone())
    return DistributedDataParallel(config, model, groups=Roles(dense=axes, expert=axes, everyone=axes.dp))


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def iterate(ddp: DistributedDataParallel, timeline: Timeline) -> float:
    """Forward, backward, and what a step asks of the wrapper; returns how long it took."""
    began = timeline.now
    timeline.events.clear()
    backward(ddp(torch.ones(1, WIDTH)).sum())
    ddp.finish_grad_sync()
    timeline.events.append("step")
    for buffer in ddp.synced_buffers:
        buffer.publish_()
    ddp.zero_grad_buffer()
    return timeline.now - began


def test_all_but_the_last_reduction_and_the_first_gather_are_hidden() -> None:
    timeline = Timeline()
    ddp = wrap(timeline)
    for _ in range(2):
        iterate(ddp, timeline)
    duration = iterate(ddp, timeline)
    compute = NUM_LAYERS * (FORWARD + BACKWARD)
    total_delay = 2 * NUM_LAYERS * DELAY
    exposed = duration - compute
    assert exposed == 2 * DELAY
    assert 1 - exposed / total_delay >= 0.8


def test_without_overlap_nothing_is_hidden() -> None:
    timeline = Timeline()
    config = replace(CONFIG, overlap_grad_reduce=False, overlap_param_gather=False)
    ddp = wrap(timeline, config)
    iterate(ddp, timeline)
    assert iterate(ddp, timeline) - NUM_LAYERS * (FORWARD + BACKWARD) == 2 * DELAY  # one bucket, there and back
    assert timeline.issued("reduce_scatter") > timeline.issued("backward")


def test_each_bucket_is_issued_once_when_its_layer_is_done_after_a_first_iteration_that_learns() -> None:
    timeline = Timeline()
    ddp = wrap(timeline)
    for iteration in range(3):
        iterate(ddp, timeline)
        assert len(timeline.issued("reduce_scatter")) == len(timeline.issued("all_gather")) == NUM_LAYERS
        assert not timeline.issued("all_reduce")
        if iteration == 0:
            assert min(timeline.issued("reduce_scatter")) > max(timeline.issued("backward"))
            continue
        in_backward = timeline.events[timeline.issued("backward")[0] : timeline.events.index("step")]
        assert in_backward == [
            event for layer in reversed(range(NUM_LAYERS)) for event in (f"backward {layer}", "reduce_scatter")
        ]


def test_microbatches_but_the_last_send_nothing() -> None:
    timeline = Timeline()
    ddp = wrap(timeline)
    iterate(ddp, timeline)
    timeline.events.clear()
    with ddp.no_sync():
        backward(ddp(torch.ones(1, WIDTH)).sum())
    assert not timeline.issued("reduce_scatter")
    backward(ddp(torch.ones(1, WIDTH)).sum())
    assert len(timeline.issued("reduce_scatter")) == NUM_LAYERS


def test_a_sum_in_fp32_holds_memory_for_one_bucket_at_a_time() -> None:
    timeline = Timeline()
    ddp = wrap(timeline, replace(CONFIG, reduce_scatter_with_fp32_accumulation=True))
    iterate(ddp, timeline)
    backward(ddp(torch.ones(1, WIDTH)).sum())
    flights = [bucket._flight for bucket in ddp.grad_sync.buckets]
    assert sum(flight is not None and flight._pending is not None for flight in flights) == 1


def test_buckets_follow_the_order_of_use_rather_than_of_registration() -> None:
    timeline = Timeline()

    class Backwards(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(list(self)):
                x = layer(x)
            return x

    model = Backwards(*(Layer(timeline, str(index)) for index in range(NUM_LAYERS)))
    axes = Axes(dp=DelayedComm(timeline), tp=Alone())
    ddp = DistributedDataParallel(CONFIG, model, groups=Roles(dense=axes, expert=axes, everyone=axes.dp))
    for _ in range(2):
        iterate(ddp, timeline)
    duration = iterate(ddp, timeline)
    assert duration - NUM_LAYERS * (FORWARD + BACKWARD) == 2 * DELAY


# --- nothing is read before it has arrived -----------------------------------------------------------------


def wrapped(model: nn.Module) -> DistributedDataParallel:
    axes = Axes(dp=DelayedComm(Timeline()), tp=Alone())
    return DistributedDataParallel(CONFIG, model, groups=Roles(dense=axes, expert=axes, everyone=axes.dp))


def test_a_buffer_that_is_published_alone_is_complete_before_use() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, dtype=torch.float64))
    ddp = wrapped(model)
    linear, norm = ddp.synced_buffers
    bucket_of(linear.memory, 0).fill_(float("nan"))
    shard_of(linear.memory, 0, 0).fill_(0.5)
    linear.publish_()
    assert model[0](torch.ones(1, WIDTH)).isfinite().all()
    assert norm.memory.param_data is not None


def test_a_state_dict_of_the_wrapper_is_complete() -> None:
    ddp = wrapped(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    publish(ddp, 0.5)
    assert all(bool((value == 0.5).all()) for value in ddp.state_dict().values())


@pytest.mark.parametrize("inner", [False, True], ids=["into the wrapper", "into the wrapped"])
def test_what_is_loaded_stays(inner: bool) -> None:
    """A gather that was still on its way brought other ranks' shards over what was loaded."""
    ddp = wrapped(nn.Linear(WIDTH, WIDTH))
    publish(ddp, 0.5)
    (ddp.module if inner else ddp).load_state_dict(
        {name: torch.full(p.shape, 2.0) for name, p in ddp.module.named_parameters()}
    )
    ddp.finish_param_sync()
    assert all(bool((param == 2.0).all()) for param in ddp.parameters())


def test_reduction_waits_for_parameters_that_no_forward_requested() -> None:
    ddp = wrapped(nn.Linear(WIDTH, WIDTH))
    publish(ddp, 0.5)
    ddp.finish_grad_sync()
    assert all(bool((param == 0.5).all()) for param in ddp.parameters())


def test_without_hooks_parameters_are_complete_after_each_step() -> None:
    ddp = wrapped(nn.Linear(WIDTH, WIDTH))
    params = list(ddp.parameters())  # reads through the module would wait

    def arrived(value: float) -> bool:
        return all(bool((param == value).all()) for param in params)

    publish(ddp, 0.5)
    ddp.disable_forward_pre_hook()
    assert arrived(0.5)
    publish(ddp, 0.25)
    assert arrived(0.25)
    ddp.enable_forward_pre_hook()
    publish(ddp, 0.125)
    assert not arrived(0.125)
    ddp.finish_param_sync()
    assert arrived(0.125)


@pytest.mark.parametrize("force", [True, False], ids=["forced", "in the background"])
def test_a_gather_can_be_requested(force: bool) -> None:
    ddp = wrapped(nn.Linear(WIDTH, WIDTH))
    params = list(ddp.parameters())
    for buffer in ddp.synced_buffers:
        shard_of(buffer.memory, 0, 0).fill_(2.0)
    ddp.start_param_sync(force_sync=force)
    assert all(bool((param == 2.0).all()) for param in params) == force
    ddp.finish_param_sync()
    assert all(bool((param == 2.0).all()) for param in ddp.parameters())


# --- ranks that see different things issue the same ------------------------------------------------------------


class Fork(nn.Module):
    """Uses its layers in an order that the caller picks, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        for index, param in enumerate(self.parameters()):
            param.data.copy_(torch.eye(WIDTH) * (1 + index))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            x = self.layers[index](x)
        return x


ORDERS = {
    "opposite orders": [(0, 1, 2, 3), (3, 2, 1, 0)],
    "different parts": [(0, 1), (2, 3)],
    "one uses nothing it holds": [(0, 1, 2, 3), ()],
    "one uses a layer twice": [(0, 1, 2, 3), (0, 0, 1, 2, 3, 3)],
}


@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS.keys())
def test_ranks_with_different_graphs_reduce_the_same_buckets_in_the_same_order(orders: list[tuple[int, ...]]) -> None:
    def rank_main(comm: ThreadComm) -> list[Tensor]:
        axes = Axes(dp=comm, tp=Alone())
        ddp = DistributedDataParallel(CONFIG, Fork(), groups=Roles(dense=axes, expert=axes, everyone=comm))
        found = []
        for iteration in range(3):
            order = orders[(comm.rank + iteration) % 2]
            x = torch.ones(1, WIDTH, requires_grad=True)
            backward(ddp(x, order).sum())
            ddp.finish_grad_sync()
            found.append(torch.cat([bucket.result.clone() for bucket in ddp.grad_sync.buckets]))
            ddp.zero_grad_buffer()
        return found

    for first, second, third in run_threads(2, rank_main):
        # The two ranks swap roles each iteration, so that the mean over both is the same.
        assert torch.equal(first, second)
        assert torch.equal(second, third)


def test_a_bucket_that_lacked_a_gradient_on_any_rank_holds_up_no_other() -> None:
    def rank_main(comm: ThreadComm) -> list[int]:
        recording = RecordingComm(comm)
        axes = Axes(dp=recording, tp=Alone())
        model = nn.ModuleList(nn.Linear(1, width, bias=False) for width in (256, 512, 768, 1024))
        config = replace(CONFIG, bucket_size=1)
        ddp = DistributedDataParallel(config, model, groups=Roles(dense=axes, expert=axes, everyone=comm))
        for _ in range(2):
            recording.calls.clear()
            ddp.zero_grad_buffer()
            for index in reversed(range(4)):
                if (comm.rank, index) != (1, 2):  # rank 1 has no gradient in the bucket of 768 elements
                    backward(model[index](torch.ones(1, 1)).sum())
            before_finish = [call.numel for call in recording.of("reduce_scatter")]
            ddp.finish_grad_sync()
        assert before_finish == [1024, 512, 256]
        return [call.numel for call in recording.of("reduce_scatter")]

    assert run_threads(2, rank_main) == [[1024, 512, 256, 768]] * 2
