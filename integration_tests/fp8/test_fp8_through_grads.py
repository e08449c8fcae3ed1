"""mxfp8 parameters gathered through the gradient buffer: equal codes on any number of ranks, and no gradient is used
twice."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_training import build, fp8_params, make_model, same, set_grads, stored, train
from parity import roles_over
from recording_comm import RecordingComm
from torch import nn

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import GradientError, run_threads
from opt_distributed.buffers import DistributedDataParallel, StorageError, UnusableGradientError
from opt_distributed.comm import Alone, Comm
from opt_kernels.quantized import QuantizedTensor
from opt_stack import get_optimizer, get_optimizer_based_on_param_groups

REUSE: dict[str, Any] = {"reuse_grad_buf_for_mxfp8_param_ag": True}
ZERO = {"use_distributed_optimizer": True}
OPTIONS: dict[str, Any] = {**ZERO, **REUSE, "wraps": True, "wrapping": {**REUSE, "bucket_size": 12_000}}


@pytest.mark.parametrize("overlaps", [False, True], ids=["in the step", "overlapped"])
@pytest.mark.parametrize("fp32", [True, False], ids=["fp32 gradients", "bf16 gradients"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_has_the_codes_of_one(ranks: int, fp32: bool, overlaps: bool) -> None:
    options = {**OPTIONS, "wrapping": {**OPTIONS["wrapping"], "grad_reduce_in_fp32": fp32}}
    (alone,) = train(1, "mxfp8", **options)
    found = train(ranks, "mxfp8", **options, overlap_param_gather=overlaps)
    assert all(same(run.stored, alone.stored) for run in found)


def test_the_codes_are_those_of_bf16_main_values() -> None:
    (alone,) = train(1, "mxfp8", **OPTIONS)
    for param in fp8_params(alone.model):
        want = QuantizedTensor.of(alone.optimizer.state[param]["fp32_param"].bfloat16(), "mxfp8")
        assert torch.equal(want.codes, param.codes)
        assert torch.equal(want.scales, param.scales)


def test_no_buffer_of_codes_is_made() -> None:
    def allocated(comm: Comm, **reuse: Any) -> int:
        recording = RecordingComm(comm)
        build(recording, "mxfp8", wraps=True, wrapping=reuse, **ZERO, **reuse)
        return sum(recording.allocated)

    saved = run_threads(2, allocated)[0] - run_threads(2, lambda comm: allocated(comm, **REUSE))[0]
    numel = 192 * 160 + 64 * 192 + 5 * 64
    assert saved >= numel + numel // 32


def ready(comm: Comm, **changes: Any) -> tuple[nn.Module, Any, Any]:
    """After a step, whose gathers have overwritten the gradients."""
    model, chunk, optimizer = build(comm, "mxfp8", **{**OPTIONS, **changes})
    set_grads(model, 0)
    assert optimizer.step().success
    return model, chunk, optimizer


def used_twice(comm: Comm) -> None:
    model, _, optimizer = ready(comm)
    before = stored(model)
    with pytest.raises(UnusableGradientError, match="were overwritten by the parameters of the last step"):
        optimizer.step()
    assert same(stored(model), before)
    optimizer.zero_grad()
    set_grads(model, 1)
    assert optimizer.step().success


def zeroed(comm: Comm) -> None:
    model, _, optimizer = ready(comm, overlap_param_gather=True)
    optimizer.zero_grad()
    assert not any(param.main_grad.any() for param in model.parameters())
    for param in fp8_params(model):
        assert param.values().abs().amax() > 0.1  # they arrived before the gradients were zeroed


def gathered_without_new_values(comm: Comm) -> None:
    model, chunk, optimizer = ready(comm)
    optimizer.zero_grad()
    before = stored(model)
    set_grads(model, 1)
    chunk.start_param_sync(force_sync=True)
    assert all(param.main_grad.any() for param in model.parameters())
    assert same(stored(model), before)


def loaded(comm: Comm) -> None:
    """Between iterations gradients stay zero; over gradients, a load is refused."""
    model, chunk, optimizer = ready(comm)
    optimizer.zero_grad()
    saved, before = optimizer.state_dict(), stored(model)
    optimizer.load_state_dict(saved)
    assert same(stored(model), before)
    assert not any(param.main_grad.any() for param in model.parameters())
    chunk(torch.randn(2, 160, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(GradientError, match=r"through gradients of bucket .* that no step has used"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("program", [used_twice, zeroed, gathered_without_new_values, loaded])
def test_gradients_and_parameters_in_one_buffer_are_never_taken_for_each_other(
    program: Callable[[Comm], None],
) -> None:
    run_threads(2, program)


def wrapped(recipe: str = "mxfp8", **fields: Any) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(fp8_param_gather=True, **ZERO, **fields)
    return DistributedDataParallel(config, make_model(recipe), groups=roles_over(Alone()))


def config(recipe: str = "mxfp8") -> OptimizerConfig:
    return OptimizerConfig(bf16=True, fp8_recipe=recipe, **ZERO, **REUSE)


def second_optimizer() -> None:
    chunk = wrapped(**REUSE)
    get_optimizer_based_on_param_groups(config(), [chunk], [{"params": [chunk.module[0].weight]}])


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "one configuration": (
        lambda: get_optimizer(config(), [wrapped()]),
        ConfigError,
        "_param_ag=True, but model chunk 0 was wrapped with reuse_grad_buf_for_mxfp8_param_ag=False",
    ),
    "a plain module": (
        lambda: get_optimizer(config(), [make_model("mxfp8")]),
        ConfigError,
        "model chunk 0 is a plain Sequential, which has no gradient buffer",
    ),
    "another recipe": (lambda: config("blockwise"), ConfigError, "_param_ag=True: needs fp8_recipe='mxfp8'"),
    "parameters of another recipe": (
        lambda: wrapped("blockwise", **REUSE), StorageError, "but fp8 parameters have the recipe 'blockwise'"
    ),
    "two optimizers": (second_optimizer, ConfigError, "train all mxfp8 parameters with one optimizer"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_buffer_that_cannot_be_shared_is_refused(name: str) -> None:
    build, error, message = REFUSED[name]
    with pytest.raises(error, match=re.escape(message)):
        build()
