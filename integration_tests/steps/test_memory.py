"""What a step allocates beyond what was there before it: at most two buckets. Bytes counted by torch's allocator.

One of four ranks, whose collectives do nothing: it holds a fourth of the state and of the reduced gradients.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Roles
from opt_distributed.comm.collectives import DONE, Pending
from opt_distributed.step import unit
from opt_kernels.backends.cpp.compiler import usable
from opt_kernels.precision import multiplies_bfloat16
from opt_stack import Optimizer, get_optimizer, release_gradients
from opt_stack.planning import design

SIZE = 4
WIDTH = 512
DEPTH = 8
NUMEL = DEPTH * (WIDTH * WIDTH + WIDTH)
BUCKET = 2 * (WIDTH * WIDTH + WIDTH)  # elements: two layers, four buckets
SMALL = 1 << 16  # bytes of statistics, steps, views: nothing that grows with the model
BF16 = torch.bfloat16
FP32 = torch.float32


def peak_bytes(call: Callable[[], object]) -> int:
    """Peak bytes that torch's allocator hands out on the CPU during `call`, relative to before it."""
    with profile(use_cpu=True, profile_memory=True) as profiled:
        call()
    events = [event for event in profiled.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


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


def built(dtype: torch.dtype, *, wrapper: dict[str, Any] | None, **fields: Any) -> tuple[nn.Module, Optimizer]:
    """`wrapper`: the arguments of `DistributedDataParallel`, None for a plain module."""
    axes = Axes(dp=First(), tp=Alone())
    roles = Roles(dense=axes, expert=axes, everyone=First())
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))).to(dtype)
    if wrapper is not None:
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=BUCKET, **wrapper)
        model = DistributedDataParallel(ddp, model, groups=roles)
    sharded = {"use_distributed_optimizer": True, "log_num_zeros_in_grad": True}
    config = OptimizerConfig(lr=1e-3, bf16=dtype is BF16, **sharded, **fields)
    return model, get_optimizer(config, [model], {}, pg_collection=roles)


def peaks_of_two_steps(model: nn.Module, optimizer: Optimizer, dtype: torch.dtype = BF16) -> list[int]:
    """The first step starts without reduced gradients, the second with the memory that the first left."""
    peaks = []
    for _ in range(2):
        model(torch.ones(2, WIDTH, dtype=dtype)).float().square().mean().backward()
        peaks.append(peak_bytes(optimizer.step))
        if isinstance(model, DistributedDataParallel):
            model.zero_grad_buffer()
    return peaks


# Gradients of these: travel and stay in bf16.
BF16_GRADS = {"use_precision_aware_optimizer": True, "main_grads_dtype": BF16}
without_widening = pytest.mark.skipif(not usable(), reason="torch's operations widen a tile of gradients at a time")
in_fp32 = pytest.param(FP32, {}, 4, id="fp32")
with_fp32_mains = pytest.param(BF16, {}, 4, id="bf16 with fp32 mains")
in_bf16 = [
    pytest.param(BF16, {**BF16_GRADS, "optimizer": rule}, 2, id=f"bf16, {rule}", marks=without_widening)
    for rule in ("adam", "lion")
]
every_dtype = pytest.mark.parametrize(("dtype", "fields", "grad_bytes"), [in_fp32, with_fp32_mains, *in_bf16])


@every_dtype
def test_a_plain_modules_step_takes_its_shard_and_two_buckets(
    dtype: torch.dtype, fields: dict[str, Any], grad_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bucket is filled while the other travels; the shard of their sums is there from construction on."""
    monkeypatch.setattr(design, "default_bucket_size", lambda num_ranks: BUCKET)
    model, optimizer = built(dtype, wrapper=None, **fields)
    (buffer,) = optimizer.plan.buffers
    (source,) = optimizer.stepper.families[0].sources
    assert [bucket.numel for bucket in buffer.layout.buckets] == [BUCKET] * 4
    assert source.memory.grad_data.nbytes == 0
    peaks = peaks_of_two_steps(model, optimizer, dtype)
    assert all(abs(peak - 2 * grad_bytes * BUCKET) <= SMALL for peak in peaks)
    held = [source.reduced.sums, *source.reduced._scratch]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == grad_bytes * NUMEL // SIZE


@every_dtype
@pytest.mark.parametrize("overlap", [False, True], ids=["in the step", "overlap"])
def test_a_wrapped_modules_step_takes_next_to_nothing(
    dtype: torch.dtype, fields: dict[str, Any], grad_bytes: int, overlap: bool
) -> None:
    """Reduced and gathered in place: nothing is allocated besides the gradients that backward filled. Statistics and
    update read bf16 gradients as they are: there is no fp32 copy of any part."""
    wrapper = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap, "grad_reduce_in_fp32": grad_bytes == 4}
    model, optimizer = built(dtype, wrapper=wrapper, overlap_param_gather=overlap, **fields)
    assert isinstance(model, DistributedDataParallel)
    assert {buffer.memory.grad_data.itemsize for buffer in model.synced_buffers} == {grad_bytes}
    assert max(peaks_of_two_steps(model, optimizer, dtype)) <= SMALL


def test_offload_on_a_cpu_copies_and_allocates_nothing_more() -> None:
    """Host and device are one: a gradient is read, and a parameter written, where it is."""

    def peak(**fields: Any) -> int:
        model = nn.Linear(256, 256, bias=False, dtype=BF16)
        optimizer = get_optimizer(OptimizerConfig(lr=0.02, bf16=True, **fields), [model])
        assert all(unit.host is None for unit in optimizer.stepper.units)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return peak_bytes(optimizer.step)

    # A copy of the gradient would have 131072 bytes.
    assert peak(optimizer_cpu_offload=True, optimizer_offload_fraction=1.0) <= peak() + 4096


@pytest.mark.parametrize("releases", [True, False])
def test_training_in_five_bytes_a_parameter(releases: bool) -> None:
    """bf16 weights, 8-bit remainders and moments; fp32 main values and the gradient of one layer at a time."""
    depth = 16
    width = 256
    moments = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8, "main_params_dtype": torch.int8}
    fields = {"bf16": True, "use_precision_aware_optimizer": True, "use_distributed_optimizer": True, **moments}
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth))).bfloat16()
    optimizer = get_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0, **fields), [model])
    if releases:
        release_gradients(optimizer)
    for _ in range(2):
        loss = model(torch.ones(1, width, dtype=BF16)).float().sum()
        peak = peak_bytes(loss.backward)
        optimizer.step()
        optimizer.zero_grad()
    state = sum(unit.state_bytes() for unit in optimizer.stepper.units)
    assert state == pytest.approx(3 * depth * width**2, rel=0.05)  # weights are two more bytes
    layer = 2 * width**2
    assert peak <= 8 * layer if releases else peak >= depth * layer


@pytest.mark.parametrize(("rule", "most"), [("adam", 3), ("muon", 7)])
def test_few_coded_mains_are_decoded_at_a_time(rule: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 matrices in scaled fp16, one or two in fp32, with what Muon computes from them."""
    width = 128
    if rule == "muon" and not multiplies_bfloat16():
        most += 2  # the operands of a product in fp32
    monkeypatch.setattr(unit, "DECODED_NUMEL", width**2)
    fields = {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.float16}
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(16))).bfloat16()
    optimizer = get_optimizer(OptimizerConfig(optimizer=rule, lr=1e-3, **fields), [model])
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert peak_bytes(optimizer.step) <= most * 4 * width**2
