"""mxfp8 parameters gathered through the gradient buffer: equal codes on any number of ranks, and no gradient is used
twice."""

from typing import Any

import pytest
import torch
from fp8_training import build, fp8_params, make_model, set_grads, stored, train
from parity import roles_over
from recording_comm import RecordingComm
from torch import nn

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import GradientError, run_threads
from opt_distributed.buffers import DistributedDataParallel, StorageError, UnusableGradientError
from opt_distributed.comm import Comm
from opt_kernels.quantized import QuantizedTensor
from opt_stack import get_optimizer, get_optimizer_based_on_param_groups

REUSE = "reuse_grad_buf_for_mxfp8_param_ag"
OPTIONS: dict[str, Any] = {
    "use_distributed_optimizer": True,
    "wraps": True,
    REUSE: True,
    "wrapping": {REUSE: True, "bucket_size": 12_000},
}


@pytest.mark.parametrize("overlaps", [False, True], ids=["in the step", "overlapped"])
@pytest.mark.parametrize("fp32", [True, False], ids=["fp32 gradients", "bf16 gradients"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_has_the_codes_of_one(ranks: int, fp32: bool, overlaps: bool) -> None:
    options = {**OPTIONS, "wrapping": {**OPTIONS["wrapping"], "grad_reduce_in_fp32": fp32}}
    (alone,) = train(1, "mxfp8", **options)
    for run in train(ranks, "mxfp8", **options, overlap_param_gather=overlaps):
        assert run.stored.equals(alone.stored)


def test_the_codes_are_those_of_bf16_main_values() -> None:
    (alone,) = train(1, "mxfp8", **OPTIONS)
    for param, (codes, scales) in zip(fp8_params(alone.model), alone.stored.fp8, strict=True):
        main = alone.optimizer.state[param]["fp32_param"]
        want = QuantizedTensor.of(main.bfloat16(), "mxfp8")
        assert torch.equal(want.codes, codes)
        assert torch.equal(want.scales, scales)


def test_no_buffer_of_codes_is_made() -> None:
    """With reuse_grad_buf_for_mxfp8_param_ag in both configurations."""

    def allocated(comm: Comm, reuses: bool) -> int:
        recording = RecordingComm(comm)
        build(recording, "mxfp8", **{**OPTIONS, REUSE: reuses, "wrapping": {REUSE: reuses}})
        return sum(recording.allocated)

    with_reuse, without = (run_threads(2, lambda comm, r=reuses: allocated(comm, r))[0] for reuses in (True, False))
    numel = 192 * 160 + 64 * 192 + 5 * 64
    assert without - with_reuse >= numel + numel // 32


def ready(comm: Comm, **changes: Any) -> tuple[nn.Module, Any, Any]:
    model, chunk, optimizer = build(comm, "mxfp8", **{**OPTIONS, **changes})
    set_grads(model, 0)
    assert optimizer.step().success
    return model, chunk, optimizer


def test_a_second_step_on_overwritten_gradients_is_refused_on_every_rank() -> None:
    def rank_main(comm: Comm) -> bool:
        model, _, optimizer = ready(comm)
        before = stored(model)
        with pytest.raises(UnusableGradientError, match="were overwritten by the parameters of the last step"):
            optimizer.step()
        assert stored(model).equals(before)
        optimizer.zero_grad()
        set_grads(model, 1)
        return optimizer.step().success

    assert run_threads(2, rank_main) == [True, True]


def test_gradients_are_zero_in_the_next_iteration_also_where_gathers_overlap() -> None:
    def rank_main(comm: Comm) -> None:
        model, _, optimizer = ready(comm, overlap_param_gather=True)
        optimizer.zero_grad()
        for param in model.parameters():
            assert not param.main_grad.any()
        for param in fp8_params(model):
            assert param.values().abs().amax() > 0.1  # they arrived before the gradients were zeroed

    run_threads(2, rank_main)


def test_a_gather_without_new_values_changes_nothing() -> None:
    def rank_main(comm: Comm) -> bool:
        model, chunk, optimizer = ready(comm)
        optimizer.zero_grad()
        before = stored(model)
        set_grads(model, 1)
        chunk.start_param_sync(force_sync=True)
        grads = all(bool(param.main_grad.any()) for param in model.parameters())
        return grads and stored(model).equals(before)

    assert run_threads(2, rank_main) == [True, True]


def test_loading_between_iterations_leaves_gradients_zero_and_loading_over_gradients_is_refused() -> None:
    def rank_main(comm: Comm) -> None:
        model, chunk, optimizer = ready(comm)
        optimizer.zero_grad()
        saved, before = optimizer.state_dict(), stored(model)
        optimizer.load_state_dict(saved)
        assert stored(model).equals(before)
        assert not any(param.main_grad.any() for param in model.parameters())
        chunk(torch.randn(2, 160, dtype=torch.bfloat16)).sum().backward()
        with pytest.raises(GradientError, match=r"through gradients of bucket .* that no step has used"):
            optimizer.load_state_dict(saved)

    run_threads(2, rank_main)


# --- refusals ---------------------------------------------------------------------------------------------------------


def wrapped(comm: Comm, recipe: str = "mxfp8", **fields: Any) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, fp8_param_gather=True, **fields)
    return DistributedDataParallel(config, make_model(recipe), groups=roles_over(comm))


def refusal(comm: Comm, chunk: nn.Module, *, reuses: bool = True) -> str:
    config = OptimizerConfig(bf16=True, fp8_recipe="mxfp8", use_distributed_optimizer=True, **{REUSE: reuses})
    with pytest.raises(ConfigError) as caught:
        get_optimizer(config, [chunk], pg_collection=roles_over(comm))
    return str(caught.value)


def test_both_configurations_must_say_it() -> None:
    texts = run_threads(2, lambda comm: refusal(comm, wrapped(comm)))
    expected = f"OptimizerConfig has {REUSE}=True, but model chunk 0 was wrapped with {REUSE}=False"
    assert all(expected in text for text in texts)


def test_a_plain_module_has_no_gradient_buffer_to_reuse() -> None:
    texts = run_threads(2, lambda comm: refusal(comm, make_model("mxfp8")))
    assert all("model chunk 0 is a plain Sequential, which has no gradient buffer" in text for text in texts)


def test_other_recipes_are_refused() -> None:
    def rank_main(comm: Comm) -> None:
        with pytest.raises(StorageError, match="but fp8 parameters have the recipe 'blockwise'"):
            wrapped(comm, "blockwise", **{REUSE: True})

    run_threads(2, rank_main)
    with pytest.raises(ConfigError, match=f"{REUSE}=True: needs fp8_recipe='mxfp8'"):
        OptimizerConfig(fp8_recipe="blockwise", **{REUSE: True})


def test_two_optimizers_on_one_buffer_are_refused() -> None:
    def rank_main(comm: Comm) -> None:
        chunk = wrapped(comm, **{REUSE: True})
        config = OptimizerConfig(bf16=True, fp8_recipe="mxfp8", use_distributed_optimizer=True, **{REUSE: True})
        group = {"params": [chunk.module[0].weight]}
        with pytest.raises(
            ConfigError, match="is not trained by this one; train all mxfp8 parameters with one optimizer"
        ):
            get_optimizer_based_on_param_groups(config, [chunk], [group], pg_collection=roles_over(comm))

    run_threads(2, rank_main)
