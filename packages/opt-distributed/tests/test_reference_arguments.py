"""The wrapper's methods take Megatron-Core's arguments, with their effects."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from data_parallel_net import OVERLAP, SHARDED, Net, batch, over
from recording_comm import RecordingComm
from test_data_parallel import backward, expected_grads, loss_of
from torch import nn

from opt_distributed import GradientError, run_threads
from opt_distributed.buffers import DistributedDataParallel, share_launch_order
from opt_distributed.buffers.main_grad import main_grad
from opt_distributed.comm.threads import ThreadComm

CONFIGS = {
    "sums": SHARDED,
    "averages": replace(SHARDED, average_in_collective=True),
    "sums in fp32": replace(SHARDED, reduce_scatter_with_fp32_accumulation=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_forced_all_reduce_gives_every_rank_whole_gradients(name: str) -> None:
    tokens = batch(0, 6)
    expected = expected_grads(partial(loss_of, tokens=tokens))

    def rank_main(comm: ThreadComm) -> None:
        recording = RecordingComm(comm)
        net = Net()
        ddp = DistributedDataParallel(CONFIGS[name], net, groups=over(recording))
        for everywhere in (False, True, False):
            recording.calls.clear()
            ddp.zero_grad_buffer()
            backward(loss_of(ddp, tokens.chunk(3)[comm.rank]))
            ddp.finish_grad_sync(force_all_reduce=everywhere)
            kinds = {call.kind for call in recording.calls if call.numel}
            assert ("all_reduce" in kinds) == everywhere
            if everywhere:
                ddp.scale_gradients(scaling_factor=0.5)
                for param_name, param in net.named_parameters():
                    torch.testing.assert_close(main_grad(param), 0.5 * expected[param_name], rtol=1e-5, atol=1e-7)

    run_threads(3, rank_main)


def test_a_forced_all_reduce_covers_all_chunks_of_an_optimizer() -> None:
    """Their reductions are launched in one order, so that the first call may launch those of later chunks."""

    def rank_main(comm: ThreadComm) -> None:
        chunks = [DistributedDataParallel(SHARDED, nn.Linear(4, 4), groups=over(comm), chunk=n) for n in range(2)]
        share_launch_order(chunks)
        for chunk in chunks:
            backward(chunk(torch.full((1, 4), float(comm.rank))).sum())
        for chunk in chunks:
            chunk.finish_grad_sync(force_all_reduce=True)
        for chunk in chunks:
            assert main_grad(chunk.module.weight).tolist() == [[0.5] * 4] * 4

    run_threads(2, rank_main)


def test_an_all_reduce_cannot_be_forced_once_gradients_are_reduced_to_shards() -> None:
    def rank_main(comm: ThreadComm) -> None:
        ddp = DistributedDataParallel(SHARDED, nn.Linear(4, 4), groups=over(comm))
        ddp.start_grad_sync()
        with pytest.raises(GradientError, match=r"force_all_reduce=True, but bucket 0 .* was reduced to shards"):
            ddp.finish_grad_sync(force_all_reduce=True)
        ddp.finish_grad_sync()
        overlapping = DistributedDataParallel(OVERLAP, nn.Linear(4, 4), groups=over(comm))
        with pytest.raises(ValueError, match="wrap the model with overlap_grad_reduce=False"):
            overlapping.finish_grad_sync(force_all_reduce=True)

    run_threads(2, rank_main)


GATHERING = replace(SHARDED, overlap_param_gather=True)


def test_hooks_are_disabled_with_or_without_a_gather() -> None:
    """Without, pending gathers complete before the next forward, not never."""

    def rank_main(comm: ThreadComm) -> None:
        for param_sync in (True, False):
            ddp = DistributedDataParallel(GATHERING, nn.Linear(4, 4), groups=over(comm))
            for buffer in ddp.synced_buffers:
                for piece in buffer.owned():
                    dict(ddp.module.named_parameters())[piece.id.name].data.view(-1)[piece.of_param] = 3.0
                buffer.publish_()
            assert ddp.param_sync.is_pending
            ddp.disable_forward_pre_hook(param_sync=param_sync)
            assert ddp.param_sync.is_pending is not param_sync
            assert ddp(torch.ones(1, 4)).tolist() == [[15.0] * 4]

    run_threads(2, rank_main)


def test_a_dispatch_may_be_forced_whatever_the_schedule_says() -> None:
    def rank_main(comm: ThreadComm) -> None:
        recording = RecordingComm(comm)
        config = replace(GATHERING, align_param_gather=True)
        ddp = DistributedDataParallel(config, nn.Linear(4, 4), groups=over(recording))
        recording.calls.clear()
        ddp.start_param_sync([])  # nothing was updated
        assert not recording.of("all_gather")
        ddp.start_param_sync(force_dispatch=True)
        assert len(recording.of("all_gather")) == 1
        assert ddp.param_sync.is_pending
        ddp.free_overlap_buffers()
        assert not ddp.param_sync.is_pending

    run_threads(2, rank_main)
