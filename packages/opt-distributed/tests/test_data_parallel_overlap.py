"""Overlap: in what order collectives are issued, how much of them compute hides, and that nothing is used too early.

Time here is a number that layers and collectives advance, not a clock: the figures are exact and the same everywhere.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from data_parallel_net import Config, all_equal, backward, bucket_of, over, shard_of
from delayed_comm import DELAY, DelayedComm, Timeline, publish
from recording_comm import RecordingComm
from torch import Tensor, nn

from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm.threads import ThreadComm

WIDTH = 16
NUM_LAYERS = 12
FORWARD = 1.0
BACKWARD = 2.0
X = torch.ones(1, WIDTH, requires_grad=True)
COMPUTE = NUM_LAYERS * (FORWARD + BACKWARD)
CONFIG = Config(
    use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=WIDTH * WIDTH
)


def timed_layer(timeline: Timeline, name: str) -> nn.Module:
    """A linear layer that takes time."""
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    layer.register_forward_hook(lambda *_: timeline.compute(f"forward {name}", FORWARD))
    layer.register_full_backward_pre_hook(lambda *_: timeline.compute(f"backward {name}", BACKWARD))
    return layer


class Backwards(nn.Sequential):
    """Calls the last layer first."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(list(self)):
            x = layer(x)
        return x


def wrap(timeline: Timeline, kind: type[nn.Sequential] = nn.Sequential, **fields: Any) -> DistributedDataParallel:
    model = kind(*(timed_layer(timeline, str(index)) for index in range(NUM_LAYERS)))
    return DistributedDataParallel(replace(CONFIG, **fields), model, groups=over(DelayedComm(timeline)))


def iterate(ddp: DistributedDataParallel, timeline: Timeline) -> float:
    """Forward, backward, and what a step asks of the wrapper; returns how much longer it took than its compute."""
    began = timeline.now
    timeline.events.clear()
    backward(ddp(X).sum())
    ddp.finish_grad_sync()
    timeline.events.append("step")
    for buffer in ddp.synced_buffers:
        buffer.place.publish_()
    ddp.zero_grad_buffer()
    return timeline.now - began - COMPUTE


@pytest.mark.parametrize("kind", [nn.Sequential, Backwards])
def test_all_but_the_last_reduction_and_first_gather_are_hidden(kind: type[nn.Sequential]) -> None:
    """2 of 24. Buckets follow the order of use rather than of registration."""
    timeline = Timeline()
    ddp = wrap(timeline, kind)
    assert [iterate(ddp, timeline) for _ in range(3)][-1] == 2 * DELAY


def test_each_bucket_is_issued_once_when_its_layer_is_done() -> None:
    timeline = Timeline()
    ddp = wrap(timeline)
    for iteration in range(3):
        timeline.events.clear()
        with ddp.no_sync():
            backward(ddp(X).sum())
        assert not timeline.issued("reduce_scatter")
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


def test_a_sum_in_fp32_holds_memory_for_one_bucket_at_a_time() -> None:
    timeline = Timeline()
    ddp = wrap(timeline, reduce_scatter_with_fp32_accumulation=True)
    iterate(ddp, timeline)
    backward(ddp(X).sum())
    flights = [bucket._flight for bucket in ddp.grad_sync.buckets]
    assert sum(flight is not None and flight._pending is not None for flight in flights) == 1


def wrapped(model: nn.Module) -> tuple[DistributedDataParallel, list[nn.Parameter]]:
    """A wrapper, and its parameters: reads through the module would wait."""
    params = list(model.parameters())
    return DistributedDataParallel(CONFIG, model, groups=over(DelayedComm(Timeline()))), params


def test_a_buffer_that_is_published_alone_is_complete_before_use() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, dtype=torch.float64))
    ddp, _ = wrapped(model)
    linear = ddp.synced_buffers[0]
    bucket_of(linear.memory, 0).fill_(float("nan"))
    shard_of(linear.memory, 0, 0).fill_(0.5)
    linear.place.publish_()
    assert model[0](torch.ones(1, WIDTH)).isfinite().all()


@pytest.mark.parametrize("inner", [False, True], ids=["into the wrapper", "into the wrapped"])
def test_what_is_loaded_stays(inner: bool) -> None:
    """A gather that was still on its way brought other ranks' shards over what was loaded."""
    ddp, params = wrapped(nn.Linear(WIDTH, WIDTH))
    publish(ddp, 0.5)
    assert all_equal(ddp.state_dict().values(), 0.5)
    saved = {name: torch.full(param.shape, 2.0) for name, param in ddp.module.named_parameters()}
    publish(ddp, 0.25)
    (ddp.module if inner else ddp).load_state_dict(saved)
    ddp.finish_param_sync()
    assert all_equal(params, 2.0)


def test_reduction_waits_for_params_that_no_forward_requested() -> None:
    ddp, params = wrapped(nn.Linear(WIDTH, WIDTH))
    publish(ddp, 0.5)
    ddp.finish_grad_sync()
    assert all_equal(params, 0.5)


def test_without_hooks_parameters_are_complete_after_each_step() -> None:
    """Hooks are disabled with or without a wait: then, pending gathers complete at the next forward, not never."""
    ddp, params = wrapped(nn.Linear(WIDTH, WIDTH))
    publish(ddp, 0.5)
    ddp.disable_forward_pre_hook()
    assert all_equal(params, 0.5)
    publish(ddp, 0.25)
    assert all_equal(params, 0.25)
    ddp.enable_forward_pre_hook()
    publish(ddp, 0.125)
    ddp.disable_forward_pre_hook(param_sync=False)
    assert not all_equal(params, 0.125)
    ddp(torch.ones(1, WIDTH))
    assert all_equal(params, 0.125)


@pytest.mark.parametrize("force", [True, False], ids=["forced", "in the background"])
def test_a_gather_can_be_requested(force: bool) -> None:
    ddp, params = wrapped(nn.Linear(WIDTH, WIDTH))
    for buffer in ddp.synced_buffers:
        shard_of(buffer.memory, 0, 0).fill_(2.0)
    ddp.start_param_sync(force_sync=force)
    assert all_equal(params, 2.0) == force
    ddp.finish_param_sync()
    assert all_equal(params, 2.0)


def test_a_bucket_without_a_gradient_does_not_delay_others() -> None:
    def rank_main(comm: ThreadComm) -> list[int]:
        recording = RecordingComm(comm)
        model = nn.ModuleList(nn.Linear(1, width, bias=False) for width in (256, 512, 768, 1024))
        ddp = DistributedDataParallel(replace(CONFIG, bucket_size=1), model, groups=over(recording))
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
