"""What a step allocates beyond what was there before it: at most two buckets. Bytes counted by torch's allocator.

One of four ranks, whose collectives do nothing: it holds a fourth of the state and of the reduced gradients.
"""

from typing import Any

import pytest
import torch
from allocations import peak_bytes
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.collectives import DONE, Pending
from opt_kernels.backends.cpp.compiler import usable
from opt_stack import Optimizer, get_optimizer, release_gradients
from opt_stack.planning import plan

SIZE, WIDTH, DEPTH = 4, 512, 8
NUMEL = DEPTH * (WIDTH * WIDTH + WIDTH)
BUCKET = 2 * (WIDTH * WIDTH + WIDTH)  # elements: two layers, four buckets
SMALL = 1 << 16  # bytes of statistics, steps, views: nothing that grows with the model


class First(Alone):
    """The first of four ranks."""

    size = SIZE

    def reduce_scatter_(self, shard: Tensor, full: Tensor, *, async_op: bool = False) -> Pending:
        return self.all_gather_(shard, full[: shard.numel()])

    def all_to_all_(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Pending:
        out.copy_(x)
        return DONE

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        if full.data_ptr() != shard.data_ptr():
            full[: shard.numel()].copy_(shard)
        return DONE

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * SIZE


class Built:
    """A model and its optimizer; `wrapper`: the arguments of `DistributedDataParallel`, None for a plain module."""

    def __init__(self, dtype: torch.dtype, *, wrapper: dict[str, Any] | None, **fields: Any):
        axes = Axes(dp=First(), tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=First())
        self.dtype = dtype
        self.model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))).to(dtype)
        if wrapper is not None:
            ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=BUCKET, **wrapper)
            self.model = DistributedDataParallel(ddp, self.model, groups=roles)
        config = OptimizerConfig(
            lr=1e-3, bf16=dtype is torch.bfloat16, use_distributed_optimizer=True, log_num_zeros_in_grad=True, **fields
        )
        self.optimizer: Optimizer = get_optimizer(config, [self.model], {}, pg_collection=roles)

    def peaks_of_two_steps(self) -> list[int]:
        """The first step starts without reduced gradients, the second with the memory that the first left."""
        peaks = []
        for _ in range(2):
            self.model(torch.ones(2, WIDTH, dtype=self.dtype)).float().square().mean().backward()
            peaks.append(peak_bytes(self.optimizer.step))
            if isinstance(self.model, DistributedDataParallel):
                self.model.zero_grad_buffer()
        return peaks


both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16 with fp32 mains"])


@both
def test_a_plain_modules_step_takes_two_buckets_in_addition_to_its_shard(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are fp32 in the buckets, of which one is filled while the other travels; the shard of their sums is
    there from construction on."""
    monkeypatch.setattr(plan, "default_bucket_size", lambda num_ranks: BUCKET)
    built = Built(dtype, wrapper=None)
    (buffer,) = built.optimizer.plan.buffers
    (source,) = built.optimizer.stepper.families[0].sources
    assert [bucket.numel for bucket in buffer.layout.buckets] == [BUCKET] * 4
    assert source.memory.grad_data.nbytes == 0
    assert all(abs(peak - 8 * BUCKET) <= SMALL for peak in built.peaks_of_two_steps())
    held = [source.reduced.sums, *source.reduced._scratch]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 4 * NUMEL // SIZE


@both
@pytest.mark.parametrize("overlap", [False, True], ids=["in the step", "overlap"])
def test_a_wrapped_modules_step_takes_next_to_nothing(dtype: torch.dtype, overlap: bool) -> None:
    """Reduced and gathered in place: nothing is allocated besides the fp32 gradients that backward filled."""
    overlaps = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    built = Built(dtype, wrapper=overlaps | {"grad_reduce_in_fp32": True}, overlap_param_gather=overlap)
    assert max(built.peaks_of_two_steps()) <= SMALL


BF16_GRADS = {"use_precision_aware_optimizer": True, "main_grads_dtype": torch.bfloat16}
without_widening = pytest.mark.skipif(not usable(), reason="torch's operations widen a tile of gradients at a time")


@without_widening
@pytest.mark.parametrize("optimizer", ["adam", "lion"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in the step", "overlap"])
def test_bf16_gradients_of_a_wrapped_module_are_read_as_they_are(optimizer: str, overlap: bool) -> None:
    """Statistics and update read the buffer that backward filled: no fp32 copy of any part of it."""
    overlaps = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    built = Built(torch.bfloat16, wrapper=overlaps, overlap_param_gather=overlap, optimizer=optimizer, **BF16_GRADS)
    assert isinstance(built.model, DistributedDataParallel)
    assert {buffer.memory.grad_data.dtype for buffer in built.model.synced_buffers} == {torch.bfloat16}
    assert max(built.peaks_of_two_steps()) <= SMALL


@without_widening
def test_bf16_gradients_of_a_plain_module_travel_and_stay_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "default_bucket_size", lambda num_ranks: BUCKET)
    built = Built(torch.bfloat16, wrapper=None, **BF16_GRADS)
    (source,) = built.optimizer.stepper.families[0].sources
    assert source.reduced.sums.nbytes == 2 * NUMEL // SIZE
    assert all(abs(peak - 4 * BUCKET) <= SMALL for peak in built.peaks_of_two_steps())


# --- a backward pass that releases gradients -------------------------------------------------------------------------

EIGHT_BIT_STATES = {
    "bf16": True,
    "use_precision_aware_optimizer": True,
    "use_distributed_optimizer": True,
    "exp_avg_dtype": torch.uint8,
    "exp_avg_sq_dtype": torch.uint8,
}


def peak_of_backward(*, releases: bool, depth: int, width: int, state_bytes: int = 4, **changes: Any) -> int:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth))).bfloat16()
    config = OptimizerConfig(lr=0.1, clip_grad=0.0, **EIGHT_BIT_STATES, **changes)
    optimizer = get_optimizer(config, [model])
    if releases:
        release_gradients(optimizer)
    for _ in range(2):
        loss = model(torch.ones(1, width, dtype=torch.bfloat16)).float().sum()
        peak = peak_bytes(loss.backward)
        optimizer.step()
        optimizer.zero_grad()
    state = sum(unit.state_bytes() for unit in optimizer.stepper.units)
    # Remainders and moments; weights are two more bytes.
    assert state == pytest.approx(state_bytes * depth * width**2, rel=0.05)
    return peak


def test_training_in_five_bytes_a_parameter() -> None:
    """bf16 weights, 8-bit remainders and moments; fp32 main values and the gradient of one layer at a time."""
    depth, width = 16, 256
    options = {"depth": depth, "width": width, "state_bytes": 3, "main_params_dtype": torch.int8}
    one = 2 * width**2
    assert peak_of_backward(releases=True, **options) <= 8 * one
    assert peak_of_backward(releases=False, **options) >= depth * one
