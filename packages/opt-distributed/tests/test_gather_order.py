"""`align_param_gather`: a schedule starts the gathers, in one order on all ranks, and no read is too early."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from data_parallel_net import Config, over
from recording_comm import RecordingComm
from torch import nn

from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel, share_launch_order
from opt_distributed.comm.threads import ThreadComm

WIDTHS = (4, 18, 24)  # of the chunks
NUMELS = (256, 512, 768)  # of their buffers, padded: records tell them apart
GATHERS = [f"all_gather {number}" for number in range(len(WIDTHS))]
Chunks = list[DistributedDataParallel]


def wrap(recording: RecordingComm, **fields: Any) -> Chunks:
    config = Config(use_distributed_optimizer=True, overlap_param_gather=True, align_param_gather=True, **fields)
    models = [nn.Linear(width, width) for width in WIDTHS]
    chunks = [DistributedDataParallel(config, of, groups=over(recording), chunk=n) for n, of in enumerate(models)]
    share_launch_order(chunks)
    recording.calls.clear()
    return chunks


def step(chunks: Chunks, value: float) -> None:
    """Writes this rank's shards, in some order of the chunks."""
    for chunk in reversed(chunks):
        for buffer in chunk.synced_buffers:
            for piece in buffer.owned():
                buffer.params[piece.id].data.view(-1)[piece.of_param] = value
            buffer.place.publish_()


def are(chunks: Chunks, value: float) -> bool:
    return all(bool((param == value).all()) for chunk in chunks for param in chunk.module.parameters())


def trace(recording: RecordingComm) -> list[str]:
    """Gathers by chunk, and reductions."""
    return [f"{call.kind} {NUMELS.index(call.numel)}" for call in recording.calls if call.numel]


def test_a_schedule_starts_the_gathers_that_are_aligned() -> None:
    def rank_main(comm: ThreadComm) -> None:
        recording = RecordingComm(comm)
        chunks = wrap(recording)
        for number in range(2):
            recording.calls.clear()
            step(chunks, float(number))
            assert trace(recording) == [], "the step starts none"
            for _ in range(2):  # asked twice, started once
                chunks[0].start_param_sync(list(chunks[0].module._parameters))
                assert trace(recording) == GATHERS[:1]
            chunks[2].start_param_sync()
            assert trace(recording) == GATHERS
            assert are(chunks, float(number))

    run_threads(2, rank_main)


def ask(chunks: Chunks) -> None:
    for chunk in chunks:
        chunk.start_param_sync()


def reduce_in_backward(chunks: Chunks) -> None:
    """Only the last chunk has gradients, of tensors that were taken from it before, so that no read waits."""
    params = [param for buffer in chunks[-1].synced_buffers for param in buffer.params.values()]
    torch.stack([param.sum() for param in params]).sum().backward()


OTHERS: dict[str, Callable[[Chunks], object]] = {
    "asks": ask,
    "asks for nothing": lambda chunks: None,
    "asks in reverse": lambda chunks: ask(chunks[::-1]),
    "reads": lambda chunks: [chunk.module.weight.sum() for chunk in chunks],  # type: ignore[union-attr, operator]
    "reads the last": lambda chunks: chunks[-1].module.state_dict(),
    "reduces the second": lambda chunks: chunks[1].start_grad_sync(),
    "reduces in backward": reduce_in_backward,
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_ranks_that_ask_differently_gather_in_one_order(other: Callable[[Chunks], object]) -> None:
    """Rank 0 has a schedule. In the end, all gathers come before the first reduction, and all values are there."""

    def rank_main(comm: ThreadComm) -> list[str]:
        recording = RecordingComm(comm)
        chunks = wrap(recording, overlap_grad_reduce=True)
        for chunk in chunks:
            reduce_in_backward([chunk])
        for chunk in chunks:
            chunk.finish_grad_sync()  # the first iteration learns
            chunk.zero_grad_buffer()
        recording.calls.clear()
        step(chunks, 3.0)
        (ask if comm.rank == 0 else other)(chunks)
        for chunk in chunks:
            chunk.finish_grad_sync()
        assert are(chunks, 3.0)
        return [kind for kind in trace(recording) if kind.startswith(("all_gather", "reduce_scatter"))]

    first, second = run_threads(2, rank_main)
    assert first == second
    assert first[: len(WIDTHS)] == GATHERS


def test_a_forced_gather_runs_even_if_it_is_not_due() -> None:
    def rank_main(comm: ThreadComm) -> None:
        recording = RecordingComm(comm)
        chunks = wrap(recording)
        chunks[1].start_param_sync(force_sync=True)
        assert not chunks[1].param_sync.is_pending
        chunks[1].start_param_sync(force_dispatch=True)
        assert trace(recording) == GATHERS[1:2] * 2
        assert chunks[1].param_sync.is_pending
        chunks[1].free_overlap_buffers()
        assert not chunks[1].param_sync.is_pending

    run_threads(2, rank_main)
