"""Megatron-Core's GPTModel and schedule with its own wrapper, optimizer and scheduler, and with ours in their place."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Job, run_jobs
from torch import Tensor
from torch.overrides import TorchFunctionMode

pytest.importorskip("megatron.core")  # `nox -s megatron` installs it

import megatron.core.distributed as their_wrappers
import megatron.core.optimizer as their_optimizers
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

import opt_stack.megatron as ours

STEPS = 6
LENGTH = 8
VOCABULARY = 32
SCHEDULE: dict[str, Any] = {
    "init_lr": 0.0,
    "max_lr": 1e-2,
    "min_lr": 1e-3,
    "lr_warmup_steps": 2,
    "lr_decay_steps": STEPS,
    "lr_decay_style": "cosine",
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_steps": STEPS,
    "wd_incr_style": "constant",
}
THEIRS = SimpleNamespace(
    DistributedDataParallel=their_wrappers.DistributedDataParallel,
    DistributedDataParallelConfig=their_wrappers.DistributedDataParallelConfig,
    OptimizerConfig=their_optimizers.OptimizerConfig,
    OptimizerParamScheduler=OptimizerParamScheduler,
    finalize_model_grads=their_wrappers.finalize_model_grads,
    get_megatron_optimizer=their_optimizers.get_megatron_optimizer,
)
OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
CASES: dict[str, tuple[dict[str, Any], float]] = {  # fields of both configurations; the allowed difference of a loss
    "Adam": ({}, 0.0),
    "Adam with overlap and buckets": ({"overlap_grad_reduce": True, "bucket_size": 500}, 0.0),
    "bf16": ({"bf16": True}, 2e-3),
    "bf16, distributed optimizer, overlap and buckets": ({"bf16": True, "bucket_size": 500, **OVERLAP}, 2e-3),
}


class OnCpu(TorchFunctionMode):
    """Megatron-Core makes its sums on "cuda", and asserts that gradients are there. No number is changed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is Tensor.type and len(args) == 1 else found


def made_model(*, bf16: bool) -> tuple[Any, Any]:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_dtype=torch.bfloat16 if bf16 else torch.float32,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH)
    return config, Float16Module(config, model) if bf16 else model


def losses(names: Any, fields: dict[str, Any]) -> list[float]:
    """The losses of a training with these names, as Megatron-LM's script trains."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *_: SimpleNamespace(wait_stream=lambda _: None)
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_, **__: nullcontext()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    config, model = made_model(bf16=bool(fields.get("bf16")))
    of_ddp = {name: value for name, value in fields.items() if name != "bf16"}
    ddp_config = names.DistributedDataParallelConfig(grad_reduce_in_fp32=True, **of_ddp)
    chunk = names.DistributedDataParallel(config, ddp_config, model)
    of_optimizer = {name: value for name, value in fields.items() if name in ("bf16", *list(OVERLAP)[::2])}
    optimizer = names.get_megatron_optimizer(
        names.OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-3, weight_decay=0.1, clip_grad=0.5, **of_optimizer),
        [chunk],
    )
    scheduler = names.OptimizerParamScheduler(optimizer, **SCHEDULE)
    config.finalize_model_grads_func = names.finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = chunk.no_sync
    found: list[float] = []

    def forward_step(batches: Any, wrapped: Any) -> Any:
        tokens = next(batches)
        loss = wrapped(tokens, torch.arange(LENGTH).expand_as(tokens), None, labels=tokens.roll(1))
        return loss, lambda out: (out.float().mean(), {"loss": out.detach().float().mean()})

    def batches(step: int) -> Any:
        for number in range(2):
            seed = (step * 2 + number) * dist.get_world_size() + dist.get_rank()
            yield torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))

    for step in range(STEPS):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        outs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches(step),
            model=[chunk],
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=2,
        )
        found += [float(out["loss"]) for out in outs]
        if optimizer.step()[0]:
            scheduler.step(1)
    return found


def compared(case: str) -> tuple[list[float], list[float]]:
    fields, _ = CASES[case]
    with OnCpu():
        return losses(THEIRS, fields), losses(ours, fields)


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    return run_jobs(2, {case: Job(compared, (case,)) for case in CASES})


@pytest.mark.parametrize("case", CASES)
def test_a_gpt_has_the_losses_of_megatron_cores_own_training(case: str, runs: dict[str, list[Any]]) -> None:
    for theirs, own in runs[case]:
        assert len(set(theirs)) == 2 * STEPS
        torch.testing.assert_close(Tensor(own), Tensor(theirs), rtol=0, atol=CASES[case][1])
