"""Fields of both configurations for ranks: who owns which part, and when and in which dtype it travels."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from named import BF16, FP16, FP32, PLAIN, Named, normal, pieces
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


class WaitedFor:
    """A collective that writes its result when it is awaited, as an asynchronous one may."""

    def __init__(self, write: Callable[[], object]):
        self.write = write

    def wait(self) -> None:
        write, self.write = self.write, lambda: None
        write()


class LateGathers(RecordingComm):
    """Forward every collective; asynchronous gathers run when they are awaited."""

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        self._note("all_gather", full)
        late = WaitedFor(lambda: self.inner.all_gather_(full, shard))
        if not async_op:
            late.wait()
        return late


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


@pytest.mark.parametrize("overlap", [False, True], ids=["in the step", "before use"])
def test_parameters_are_gathered_in_the_step_or_before_use(overlap: bool) -> None:
    def rank_main(comm: ThreadComm) -> tuple[int, int]:
        late = LateGathers(comm)
        model = wrapped(late, overlap_param_gather=overlap)
        config = OptimizerConfig(
            **{**PLAIN, "weight_decay": 0.0}, use_distributed_optimizer=True, overlap_param_gather=overlap
        )
        optimizer = get_optimizer(config, [model], {}, pg_collection=roles_over(late))
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        (buffer,) = model.synced_buffers  # to read the parameter itself would wait for it
        fresh = int((buffer.memory.param_data != 1).sum())
        model(torch.ones(1, 16))
        return fresh, int((model.module.weight != 1).sum())

    assert run_threads(2, rank_main) == [(128 if overlap else 256, 256)] * 2  # half of it is a rank's own


def test_both_configurations_must_say_when_parameters_are_gathered() -> None:
    config = OptimizerConfig(**PLAIN, use_distributed_optimizer=True, overlap_param_gather=True)
    for model, message in ((Layer(), "is a plain Layer"), (wrapped(Alone()), "was wrapped with overlap_param_g")):
        with pytest.raises(ConfigError, match=message):
            get_optimizer(config, [model], {})


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


class Reduced(NamedTuple):
    """One reduction as a rank saw it: the collectives, and what came out for the first parameter."""

    kinds: list[str]
    num_bytes: int
    values: set[float]


def reduce_once(config: Config, *grads: float, dtype: torch.dtype = FP32) -> Reduced:
    """A parameter of 256 elements whose gradient is the n-th of `grads` on rank n, as rank 0 saw it."""

    def rank_main(comm: ThreadComm) -> Reduced:
        recording = RecordingComm(comm)
        ddp = DistributedDataParallel(config, Named(weight=torch.zeros(256, dtype=dtype)), groups=roles_over(recording))
        recording.calls.clear()
        main_grad(ddp.module.weight).fill_(grads[comm.rank])
        ddp.finish_grad_sync()
        (buffer,) = ddp.synced_buffers
        owned = [buffer.grad(piece.id, piece.of_param) for piece in buffer.owned()]
        values = {value for grad in owned for value in grad.flatten().tolist()}
        kinds = [call.kind for call in recording.calls]
        return Reduced(kinds, max(call.num_bytes for call in recording.calls), values)

    first: Reduced = run_threads(len(grads), rank_main)[0]
    return first


SHARDED = Config(use_distributed_optimizer=True)


def test_a_wrapper_reduces_everywhere_or_to_shards() -> None:
    assert reduce_once(Config(), 1.0, 3.0) == Reduced(["all_reduce"], 1024, {2.0})
    assert reduce_once(SHARDED, 1.0, 3.0) == Reduced(["reduce_scatter"], 1024, {2.0})


def test_a_wrapper_reduces_in_the_requested_dtype() -> None:
    fp32 = replace(SHARDED, grad_reduce_in_fp32=True)
    assert reduce_once(SHARDED, 1.0, 2.0**-9, dtype=BF16) == Reduced(["reduce_scatter"], 512, {0.5})
    assert reduce_once(fp32, 1.0, 2.0**-9, dtype=BF16) == Reduced(["reduce_scatter"], 1024, {0.5 + 2.0**-10})


def test_sums_in_fp32_travel_as_parts() -> None:
    config = replace(SHARDED, reduce_scatter_with_fp32_accumulation=True)
    assert reduce_once(config, 1.0, 2.0**-9, dtype=BF16) == Reduced(["all_to_all"], 512, {0.5})


def test_a_mean_may_be_taken_after_the_sum() -> None:
    smallest = 2.0**-24  # of fp16: half of it is zero, twice it is not
    assert reduce_once(Config(), smallest, smallest, dtype=FP16).values == {0.0}
    assert reduce_once(Config(average_in_collective=True), smallest, smallest, dtype=FP16).values == {smallest}


def test_buckets_are_padded_to_the_size_at_which_links_are_fastest() -> None:
    assert reduce_once(SHARDED, 1.0, 1.0).num_bytes == 4 * 256
    assert reduce_once(replace(SHARDED, pad_buckets_for_high_nccl_busbw=True), 1.0, 1.0).num_bytes == 4 * 2**16


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [({"bucket_size": 1}, [1024] * 4), ({"num_buckets": 2}, [2048] * 2), ({}, [4096])],
    ids=["bucket_size", "num_buckets", "neither"],
)
def test_buckets_close_at_the_requested_size_if_something_overlaps(fields: dict[str, int], sizes: list[int]) -> None:
    def rank_main(comm: ThreadComm) -> list[int]:
        recording = RecordingComm(comm)
        model = Named(**{name: torch.zeros(256) for name in "abcd"})
        config = replace(SHARDED, overlap_grad_reduce=True, **fields)
        ddp = DistributedDataParallel(config, model, groups=roles_over(recording))
        recording.calls.clear()
        ddp.finish_grad_sync()
        return [call.num_bytes for call in recording.of("reduce_scatter")]

    assert run_threads(2, rank_main) == [sizes] * 2


@pytest.mark.parametrize("overlap", [False, True], ids=["in the step", "in backward"])
def test_gradients_are_reduced_in_the_step_or_in_backward(overlap: bool) -> None:
    def rank_main(comm: ThreadComm) -> int:
        recording = RecordingComm(comm)
        ddp = DistributedDataParallel(
            replace(SHARDED, overlap_grad_reduce=overlap), Layer(), groups=roles_over(recording)
        )
        for _ in range(2):  # the first iteration learns the order
            recording.calls.clear()
            ddp.zero_grad_buffer()
            ddp(torch.ones(1, 16)).sum().backward()
            in_backward = len(recording.of("reduce_scatter"))
            ddp.finish_grad_sync()
        return in_backward

    assert run_threads(2, rank_main) == [int(overlap)] * 2


@pytest.mark.parametrize("fields", [{"exp_avg_dtype": torch.uint8}, {"main_params_dtype": FP16}], ids=["8-bit", "fp16"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "wrapped"])
def test_blocks_with_one_scale_are_not_cut_between_ranks(size: int, wraps: bool, fields: dict[str, Any]) -> None:
    """128 elements share a scale: cut, they would have two, and other bits on every number of ranks."""

    def rank_main(comm: ThreadComm) -> list[int]:
        model: nn.Module = Named(first=normal(1001, seed=1).bfloat16(), second=normal(77, seed=2).bfloat16())
        sharded = {"bf16": True, "use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
        if wraps:
            ddp = Config(use_distributed_optimizer=True)
            model = DistributedDataParallel(ddp, model, groups=roles_over(comm))
        config = OptimizerConfig(**PLAIN, **sharded, **fields)
        optimizer = get_optimizer(config, [model], {}, pg_collection=roles_over(comm))
        return [piece.of_param.start for piece in pieces(optimizer)]

    starts = [start for of_rank in run_threads(size, rank_main) for start in of_rank]
    assert max(starts) > 0
    assert {start % 128 for start in starts} == {0}
