"""`param_name_patterns_for_fp32_local_accumulation`: microbatches add up in fp32 and are rounded once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from data_parallel_net import Config, backward, over
from recording_comm import RecordingComm
from torch import Tensor, nn

from opt_distributed import GradientError, run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.buffers.main_grad import main_grad
from opt_distributed.comm import Alone, Comm
from opt_distributed.comm.threads import ThreadComm

BF16 = torch.bfloat16
SMALL = 2.0**-9  # lost when added to 1 in bf16, whose numbers there are 2**-7 apart; four of them are not
MICROBATCHES = (1.0, SMALL, SMALL, SMALL, SMALL)
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "sharded": {"use_distributed_optimizer": True},
    "overlapping": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 8},
    "fp32 sums": {"use_distributed_optimizer": True, "reduce_scatter_with_fp32_accumulation": True},
    "averaged": {"average_in_collective": True},
}


class Model(nn.Module):
    """Two layers whose gradients are the input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(8, 1, bias=False, dtype=dtype)
        self.second = nn.Linear(8, 1, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x) + self.second(x)).sum()  # type: ignore[no-any-return]


def wrap(comm: Comm, *patterns: str, dtype: torch.dtype = BF16, **fields: Any) -> DistributedDataParallel:
    config = Config(param_name_patterns_for_fp32_local_accumulation=patterns, **fields)
    return DistributedDataParallel(config, Model(dtype), groups=over(comm))


def accumulate(ddp: DistributedDataParallel, *values: float) -> None:
    """One backward pass for each value; every gradient is the value everywhere."""
    *others, last = values
    with ddp.no_sync():
        for value in others:
            backward(ddp(torch.full((1, 8), value, dtype=BF16)))
    backward(ddp(torch.full((1, 8), last, dtype=BF16)))


def reduced(ddp: DistributedDataParallel) -> dict[str, set[float]]:
    """This rank's part of the reduced gradients, and the same as `main_grad` has it."""
    ddp.finish_grad_sync()
    found: dict[str, set[float]] = {"first.weight": set(), "second.weight": set()}
    for buffer in ddp.synced_buffers:
        for piece in buffer.owned():
            grad = buffer.grad(piece.id, piece.of_param)
            bound = main_grad(ddp.module.get_parameter(piece.id.name)).view(-1)[piece.of_param]
            assert torch.equal(bound, grad.view(-1)), "main_grad has the reduced gradient"
            found[piece.id.name] |= set(grad.flatten().tolist())
    return found


@pytest.mark.parametrize("fields", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("patterns", [("first.*",), ("all",), ("nothing", "s?cond.weight")], ids=str)
def test_microbatches_of_the_parameters_named_add_up_in_fp32(fields: dict[str, Any], patterns: tuple[str, ...]) -> None:
    """Three iterations: overlap begins with the second, and every one begins at zero."""
    named = {"first.weight": patterns[0] != "nothing", "second.weight": patterns[0] != "first.*"}

    def rank_main(comm: ThreadComm) -> None:
        ddp = wrap(comm, *patterns, **fields)
        for _ in range(3):
            accumulate(ddp, *MICROBATCHES)
            for name, values in reduced(ddp).items():
                assert values <= {1.0 + 4 * SMALL if named[name] else 1.0}
            ddp.zero_grad_buffer()

    run_threads(2, rank_main)


def test_sent_grads_have_the_params_dtype_and_fp32_needs_no_copy() -> None:
    recording = RecordingComm(Alone())
    ddp = wrap(recording, "all")
    accumulate(ddp, 1.0)
    ddp.finish_grad_sync()
    assert [call.num_bytes for call in recording.of("all_reduce")] == [2 * 16]
    assert all(bucket.sums == {} for bucket in wrap(Alone(), "all", dtype=torch.float32).grad_sync.buckets)


def scaled(ddp: DistributedDataParallel) -> None:
    ddp.scale_gradients(2.0)


def rebound(ddp: DistributedDataParallel) -> None:
    for param in ddp.module.parameters():
        param.main_grad = main_grad(param) * 2.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("doubles", [scaled, rebound])
@pytest.mark.parametrize("when", ["before the reduction", "after it"])
def test_a_factor_reaches_the_sum(doubles: Callable[[DistributedDataParallel], None], when: str) -> None:
    ddp = wrap(Alone(), "first.*")
    accumulate(ddp, *MICROBATCHES)
    if when == "after it":
        ddp.finish_grad_sync()
    doubles(ddp)
    assert reduced(ddp) == {"first.weight": {2.0 + 8 * SMALL}, "second.weight": {2.0}}


def test_memory_that_was_given_away_comes_back_as_zeros() -> None:
    ddp = wrap(Alone(), "all")
    accumulate(ddp, 1.0)
    ddp.offload_grad_buffers()
    assert all(main_grad(param).untyped_storage().nbytes() == 0 for param in ddp.module.parameters())
    assert all(buffer.memory.grad_data.untyped_storage().nbytes() == 0 for buffer in ddp.synced_buffers)
    for refused in (lambda: accumulate(ddp, 1.0), ddp.finish_grad_sync, ddp.start_grad_sync):
        with pytest.raises(GradientError, match=r"was freed by offload_grad_buffers\(\); call restore_grad_buffers"):
            refused()
    ddp.restore_grad_buffers()
    accumulate(ddp, *MICROBATCHES)
    assert reduced(ddp)["first.weight"] == {1.0 + 4 * SMALL}
