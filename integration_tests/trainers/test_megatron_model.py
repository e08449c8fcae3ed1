"""Megatron-Core's GPTModel and schedule with its own wrapper, optimizer and scheduler, and with ours in their place."""

import os
import sys
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # emerging-optimizers compiles functions

import pytest
import torch
from processes import Job, run_jobs
from torch import Tensor

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

sys.path.insert(0, str(Path(__file__).parents[2] / "packages/opt-checkpoint/tests_megatron"))
from write_megatron import OnCpu

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


class Case(NamedTuple):
    """A training: fields of both configurations, and the allowed difference of a loss as a fraction of it."""

    fields: dict[str, Any] = {}  # noqa: RUF012  # never modified
    tolerance: float = 0.0
    ranks: int = 2
    tensor_parallel: int = 1
    pipeline: int = 1
    steps: int = STEPS
    of_optimizer: dict[str, Any] = {}  # noqa: RUF012  # fields of the optimizer's configuration
    of_ours: dict[str, Any] = {}  # noqa: RUF012  # of ours only


ROOTS = torch.linspace(1e-3, 1.0, 4096)
# On Intel's processors torch takes MKL's roots, of which one in a hundred or two is not rounded correctly; ours are.
SAME_BITS = 0.0 if torch.equal(ROOTS.sqrt(), ROOTS.double().sqrt().float()) else 5e-7
CASES = {
    "Adam": Case(tolerance=SAME_BITS),
    "Adam with overlap and buckets": Case({"overlap_grad_reduce": True, "bucket_size": 500}, SAME_BITS),
    "bf16": Case({"bf16": True}, 2e-3 / 3),
    "bf16, distributed optimizer, overlap and buckets": Case({"bf16": True, "bucket_size": 500, **OVERLAP}, 2e-3 / 3),
    "Adam, TP 2 x DP 2": Case(tolerance=5e-7, ranks=4, tensor_parallel=2),  # norms are summed in another order
    "Adam, PP 2 x DP 2": Case(tolerance=5e-7, ranks=4, pipeline=2),
}
if find_spec("emerging_optimizers"):
    muon = {"optimizer": "muon", "muon_fp32_matmul_prec": "high"}
    layer_wise = {"use_layer_wise_distributed_optimizer": True}
    CASES |= {
        # Megatron-Core's layer-wise optimizer has no scale_loss in fp32; whole matrices on every rank are its updates.
        "Muon, layer-wise": Case(tolerance=5e-6, steps=20, of_optimizer=muon, of_ours=layer_wise),
        # Twice the difference of Megatron-Core's own losses with one thread and with two.
        "Muon, layer-wise, bf16": Case({"bf16": True}, 1.06e-3, steps=20, of_optimizer={**muon, **layer_wise}),
    }


def made_model(case: Case) -> tuple[Any, Any]:
    bf16 = bool(case.fields.get("bf16"))
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
        tensor_model_parallel_size=case.tensor_parallel,
        pipeline_model_parallel_size=case.pipeline,
    )
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return config, Float16Module(config, model) if bf16 else model


def losses(names: Any, case: Case) -> list[float]:
    """The losses of a training with these names, as Megatron-LM's script trains; none before the last stage."""
    fields = case.fields
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.current_stream = lambda *_: SimpleNamespace(wait_stream=lambda _: None)
    torch.cuda.synchronize = lambda *_: None
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_, **__: nullcontext()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(case.tensor_parallel, case.pipeline)
    config, model = made_model(case)
    of_ddp = {name: value for name, value in fields.items() if name != "bf16"}
    ddp_config = names.DistributedDataParallelConfig(grad_reduce_in_fp32=True, **of_ddp)
    chunk = names.DistributedDataParallel(config, ddp_config, model)
    of_optimizer = {name: value for name, value in fields.items() if name in ("bf16", *list(OVERLAP)[::2])}
    numbers = {"lr": 1e-2, "min_lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}
    of_optimizer |= {**case.of_optimizer, **(case.of_ours if names is ours else {})}
    optimizer_config = names.OptimizerConfig(**{"optimizer": "adam", **numbers, **of_optimizer})
    optimizer = names.get_megatron_optimizer(optimizer_config, [chunk])
    scheduler = names.OptimizerParamScheduler(optimizer, **{**SCHEDULE, "lr_decay_steps": case.steps})
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
            replicas = parallel_state.get_data_parallel_world_size()
            seed = (step * 2 + number) * replicas + parallel_state.get_data_parallel_rank()
            yield torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))

    for step in range(case.steps):
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
    with OnCpu():
        return losses(THEIRS, CASES[case]), losses(ours, CASES[case])


@cache
def runs(ranks: int) -> dict[str, list[Any]]:
    return run_jobs(ranks, {name: Job(compared, (name,)) for name, case in CASES.items() if case.ranks == ranks})


@pytest.mark.parametrize("name", CASES)
def test_a_gpt_has_the_losses_of_megatron_cores_own_training(name: str) -> None:
    case = CASES[name]
    found = [pair for pair in runs(case.ranks)[name] if pair[0]]
    assert len(found) == case.ranks // case.pipeline
    for theirs, own in found:
        assert len(set(theirs)) == 2 * case.steps
        torch.testing.assert_close(Tensor(own), Tensor(theirs), rtol=case.tolerance, atol=0)


def eigenvalues(state: Any, side: str, factor: Tensor) -> Tensor:
    """The diagonal of a factor in the basis of a state."""
    basis = state[f"Q_{side}"]
    return (basis.T @ factor @ basis).diagonal()


@pytest.mark.parametrize("is_kl", [True, False], ids=["KL", "plain"])
@pytest.mark.parametrize("shape", [(4, 3), (3, 4)], ids=str)
def test_soap_makes_the_update_of_megatron_core_from_its_state(shape: tuple[int, int], is_kl: bool) -> None:
    """Single updates, because whole runs of it diverge; only where eigenvalues keep their order.

    Elsewhere emerging-optimizers 0.3.0 reorders `exp_avg_sq`. The earlier runs that ours follows do not.
    """
    pytest.importorskip("emerging_optimizers")
    from megatron.core.optimizer.emerging_optimizers import _create_emerging_optimizer

    numbers = torch.Generator().manual_seed(0)
    fields: dict[str, Any] = {"optimizer": "soap", "lr": 1e-2, "clip_grad": 0.0, "soap_use_kl_shampoo": is_kl}
    weight = torch.nn.Parameter(torch.zeros(shape))
    config = their_optimizers.OptimizerConfig(**fields)
    theirs, _ = _create_emerging_optimizer(config, [{"params": [weight]}], "soap", [], None)
    layer = torch.nn.Linear(shape[1], shape[0], bias=False)
    own = ours.get_megatron_optimizer(ours.OptimizerConfig(soap_order="megatron", **fields), [layer])
    compared = 0
    for step in range(30):
        before = weight.detach().clone()
        layer.weight.data.copy_(before)
        if step:
            state = {**theirs.state[weight]}
            state |= {f"eigvals_{side}": eigenvalues(state, side, state[side]) for side in "LR"}
            saved = own.state_dict()
            (of_weight,) = saved["state"].values()
            for name in of_weight.keys() - {"step"}:
                of_weight[name].copy_(state[name])
            own.load_state_dict(saved)
        weight.grad = torch.randn(shape, generator=numbers)
        layer.weight.grad = weight.grad.clone()
        theirs.step()
        own.step()
        after = theirs.state[weight]
        values = [eigenvalues(of, side, after[side]) for side in "LR" for of in (state, after)] if step else []
        if values and all(bool((each.diff() < 0).all()) for each in values):
            update = weight.detach() - before
            assert float((layer.weight.detach() - weight.detach()).norm() / update.norm()) < 5e-6, step
            compared += 1
    assert compared > 2
