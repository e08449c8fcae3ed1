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
from opt_stack import get_optimizer

MATRIX = 256  # elements; of state, Adam keeps 8 bytes each and Muon 4
FLAT, WHOLE = {"use_distributed_optimizer": True}, {"use_layer_wise_distributed_optimizer": True}
STATE_BYTES: dict[str, tuple[dict[str, Any], list[int]]] = {  # of two matrices, by rank
    "replicated": ({}, [16 * MATRIX] * 4),
    "flat shards": (FLAT, [4 * MATRIX] * 4),
    "Muon, replicated": ({"optimizer": "muon"}, [8 * MATRIX] * 3),
    "Muon, whole matrices": ({"optimizer": "muon", **WHOLE}, [0, 4 * MATRIX, 4 * MATRIX]),
}


@pytest.mark.parametrize("name", STATE_BYTES)
def test_ranks_divide_the_state(name: str) -> None:
    fields, expected = STATE_BYTES[name]

    def rank_main(comm: Comm) -> int:
        model = Named(first=normal(16, 16, seed=1), second=normal(16, 16, seed=2))
        optimizer = get_optimizer(OptimizerConfig(**PLAIN, **fields), [model], {}, pg_collection=roles_over(comm))
        return sum(unit.state_bytes() for unit in optimizer.stepper.units)

    assert sorted(run_threads(len(expected), rank_main)) == expected


class Layer(nn.Module):
    """A weight that a forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


WITH_BF16_GRADS = {"bf16": True, "use_precision_aware_optimizer": True, "main_grads_dtype": BF16}
WITH_FP32_GRADS = Config(grad_reduce_in_fp32=True)
DIFFER: dict[str, tuple[Config, dict[str, Any], str]] = {
    "gathers": (Config(**FLAT), {**FLAT, "overlap_param_gather": True}, "was wrapped with overlap_param_g"),
    "gradients": (WITH_FP32_GRADS, WITH_BF16_GRADS, "but model chunk 0 was wrapped with grad_reduce_in_fp32=True"),
}


@pytest.mark.parametrize("name", DIFFER)
def test_configurations_that_differ_are_refused(name: str) -> None:
    wrapping, fields, message = DIFFER[name]
    model = DistributedDataParallel(wrapping, Layer().to(BF16 if "bf16" in fields else FP32))
    with pytest.raises(ConfigError, match=message):
        get_optimizer(OptimizerConfig(**PLAIN, **fields), [model], {})


@pytest.mark.parametrize("with_step", [False, True], ids=["after the step", "with the step"])
def test_the_first_chunk_may_be_gathered_while_the_others_are_stepped(with_step: bool) -> None:
    """At the time of the first gather the second chunk has, or has not yet, been updated."""

    class Watching(RecordingComm):
        def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
            seen.append(bool((chunks[1].module.weight == 1).all()))
            return super().all_gather_(full, shard, async_op=async_op)

    seen: list[bool] = []
    roles, fields = roles_over(Watching(Alone())), {**FLAT, "overlap_param_gather": True}
    chunks = [DistributedDataParallel(Config(**fields), Layer(), groups=roles, chunk=number) for number in range(2)]
    config = OptimizerConfig(**PLAIN, **fields, overlap_param_gather_with_optimizer_step=with_step)
    optimizer = get_optimizer(config, chunks, {}, pg_collection=roles)
    chunks[1](chunks[0](torch.ones(1, 16))).sum().backward()
    optimizer.step()
    assert seen == [with_step, False]


SHARDED = Config(use_distributed_optimizer=True)
PADDED, LATE = replace(SHARDED, pad_buckets_for_high_nccl_busbw=True), Config(average_in_collective=True)
SMALLEST = 2.0**-24  # of fp16: half of it is zero, twice it is not
# The configuration, the gradients of two ranks and their dtype: the collectives, the most bytes of one, the values.
REDUCED: dict[str, tuple[Config, tuple[float, float], torch.dtype, tuple[list[str], int, set[float]]]] = {
    "everywhere": (Config(), (1.0, 3.0), FP32, (["all_reduce"], 1024, {2.0})),
    "to shards": (SHARDED, (1.0, 3.0), FP32, (["reduce_scatter"], 1024, {2.0})),
    "a mean before the sum": (Config(), (SMALLEST, SMALLEST), FP16, (["all_reduce"], 512, {0.0})),
    "a mean after the sum": (LATE, (SMALLEST, SMALLEST), FP16, (["all_reduce"], 512, {SMALLEST})),
    "padded to the size at which links are fastest": (PADDED, (1.0, 1.0), FP32, (["reduce_scatter"], 2**18, {1.0})),
}


@pytest.mark.parametrize("name", REDUCED)
def test_a_wrapper_reduces_as_it_is_configured(name: str) -> None:
    """A parameter of 256 elements, as rank 0 sees it."""
    config, grads, dtype, expected = REDUCED[name]

    def rank_main(comm: Comm) -> tuple[list[str], int, set[float]]:
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


@pytest.mark.parametrize("fields", [{}, FLAT], ids=["everywhere", "to shards"])
@pytest.mark.parametrize(("dtype", "total"), [(FP32, 1 + 2.0**-9), (BF16, 1.0)], ids=["fp32", "bf16"])
def test_gradients_of_a_plain_module_are_summed_in_the_requested_dtype(
    dtype: torch.dtype, total: float, fields: dict[str, Any]
) -> None:
    """1 on one rank and 2^-9 on the other: their sum has 10 bits, of which bf16 keeps 8, in half of the bytes."""

    def rank_main(comm: Comm) -> tuple[list[float], int]:
        recording, model = RecordingComm(comm), Named(weight=torch.zeros(MATRIX, dtype=BF16))
        sgd = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 1.0, "weight_decay": 0.0, "clip_grad": 0.0}
        config = OptimizerConfig(**sgd, **fields, **{**WITH_BF16_GRADS, "main_grads_dtype": dtype})
        optimizer = get_optimizer(config, [model], {}, pg_collection=roles_over(recording))
        model.weight.grad = torch.full((MATRIX,), 2.0**-9 if comm.rank else 1.0, dtype=BF16)
        recording.calls.clear()
        optimizer.step()
        reductions = [call.num_bytes for call in recording.calls if call.kind in ("all_reduce", "reduce_scatter")]
        return (-2 * optimizer.get_parameters()[0]).unique().tolist(), max(reductions)  # twice the mean

    assert run_threads(2, rank_main) == [([total], MATRIX * dtype.itemsize)] * 2
