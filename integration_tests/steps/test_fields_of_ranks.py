"""Fields of both configurations for ranks: who owns which part, and when and in which dtype it travels."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from named import BF16, FP16, FP32, PLAIN, Named, normal
from parity import roles_over
from recording_comm import RecordingComm
from torch import Tensor, nn

from opt_config import ConfigError, OptimizerConfig
from opt_config import DistributedDataParallelConfig as Config
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.buffers.main_grad import main_grad
from opt_distributed.comm import Alone, Comm
from opt_distributed.comm.collectives import Pending
from opt_distributed.comm.threads import ThreadComm
from opt_stack import get_optimizer

# --- which part lives where, and when it travels ----------------------------------------------------------------------


def state_bytes_of(size: int, **fields: Any) -> list[int]:
    """Each rank's bytes of state (without parameters and gradients), for two matrices of 256 elements."""

    def rank_main(comm: ThreadComm) -> int:
        model = Named(first=normal(16, 16, seed=1), second=normal(16, 16, seed=2))
        optimizer = get_optimizer(OptimizerConfig(**PLAIN, **fields), [model], {}, pg_collection=roles_over(comm))
        return sum(unit.state_bytes() for unit in optimizer.stepper.units)

    return run_threads(size, rank_main)


def test_flat_shards_divide_the_state() -> None:
    assert state_bytes_of(4) == [2 * 256 * 8] * 4
    assert state_bytes_of(4, use_distributed_optimizer=True) == [2 * 256 * 8 // 4] * 4


def test_whole_matrices_are_dealt_to_ranks() -> None:
    assert state_bytes_of(3, optimizer="muon") == [2 * 256 * 4] * 3
    dealt = state_bytes_of(3, optimizer="muon", use_layer_wise_distributed_optimizer=True)
    assert sorted(dealt) == [0, 256 * 4, 256 * 4]


class Layer(nn.Module):
    """A weight that a forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def wrapped(comm: Comm, **fields: Any) -> DistributedDataParallel:
    config = Config(use_distributed_optimizer=True, **fields)
    return DistributedDataParallel(config, Layer(), groups=roles_over(comm))


def test_both_configurations_must_say_when_parameters_are_gathered() -> None:
    config = OptimizerConfig(**PLAIN, use_distributed_optimizer=True, overlap_param_gather=True)
    for model, message in ((Layer(), "is a plain Layer"), (wrapped(Alone()), "was wrapped with overlap_param_g")):
        with pytest.raises(ConfigError, match=message):
            get_optimizer(config, [model], {})


def test_bf16_gradients_of_a_wrapper_that_keeps_fp32_ones_are_refused() -> None:
    model = DistributedDataParallel(Config(grad_reduce_in_fp32=True), nn.Linear(3, 2).to(BF16))
    with pytest.raises(ConfigError, match="but model chunk 0 was wrapped with grad_reduce_in_fp32=True"):
        get_optimizer(
            OptimizerConfig(**PLAIN, bf16=True, use_precision_aware_optimizer=True, main_grads_dtype=BF16), [model], {}
        )


@pytest.mark.parametrize("with_step", [False, True], ids=["after the step", "with the step"])
def test_the_first_chunk_may_be_gathered_while_the_others_are_stepped(with_step: bool) -> None:
    """At the time of the first gather the second chunk has, or has not yet, been updated."""

    class Watching(RecordingComm):
        def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
            seen.append(bool((chunks[1].module.weight == 1).all()))
            return super().all_gather_(full, shard, async_op=async_op)

    seen: list[bool] = []
    watching = Watching(Alone())
    ddp = Config(use_distributed_optimizer=True, overlap_param_gather=True)
    chunks = [DistributedDataParallel(ddp, Layer(), groups=roles_over(watching), chunk=number) for number in range(2)]
    fields = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    config = OptimizerConfig(**PLAIN, **fields, overlap_param_gather_with_optimizer_step=with_step)
    optimizer = get_optimizer(config, chunks, {}, pg_collection=roles_over(watching))
    chunks[1](chunks[0](torch.ones(1, 16))).sum().backward()
    optimizer.step()
    assert seen == [with_step, False]


# --- the wrapper ------------------------------------------------------------------------------------------------------

SHARDED = Config(use_distributed_optimizer=True)
SMALLEST = 2.0**-24  # of fp16: half of it is zero, twice it is not
# The configuration, the gradients of two ranks and their dtype: the collectives, the most bytes of one, the values.
REDUCED: dict[str, tuple[Config, tuple[float, float], torch.dtype, tuple[list[str], int, set[float]]]] = {
    "everywhere": (Config(), (1.0, 3.0), FP32, (["all_reduce"], 1024, {2.0})),
    "to shards": (SHARDED, (1.0, 3.0), FP32, (["reduce_scatter"], 1024, {2.0})),
    "a mean before the sum": (Config(), (SMALLEST, SMALLEST), FP16, (["all_reduce"], 512, {0.0})),
    "a mean after the sum": (
        Config(average_in_collective=True), (SMALLEST, SMALLEST), FP16, (["all_reduce"], 512, {SMALLEST}),
    ),
    "padded to the size at which links are fastest": (
        replace(SHARDED, pad_buckets_for_high_nccl_busbw=True), (1.0, 1.0), FP32, (["reduce_scatter"], 2**18, {1.0}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCED)
def test_a_wrapper_reduces_as_it_is_configured(name: str) -> None:
    """A parameter of 256 elements, as rank 0 sees it."""
    config, grads, dtype, expected = REDUCED[name]

    def rank_main(comm: ThreadComm) -> tuple[list[str], int, set[float]]:
        recording = RecordingComm(comm)
        ddp = DistributedDataParallel(config, Named(weight=torch.zeros(256, dtype=dtype)), groups=roles_over(recording))
        recording.calls.clear()
        main_grad(ddp.module.weight).fill_(grads[comm.rank])
        ddp.finish_grad_sync()
        (buffer,) = ddp.synced_buffers
        owned = [buffer.grad(piece.id, piece.of_param) for piece in buffer.owned()]
        values = {value for grad in owned for value in grad.flatten().tolist()}
        return [call.kind for call in recording.calls], max(call.num_bytes for call in recording.calls), values

    assert run_threads(2, rank_main)[0] == expected
