"""Megatron-Core's names, classes, argument orders, modules and wrappers in `opt_stack.megatron`."""

import copy
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stack_models import assert_equal, backward, make_model, over, weights
from torch import Tensor, nn

import opt_stack
import opt_stack.megatron as megatron
from opt_distributed import run_threads
from opt_distributed.buffers.main_grad import main_grad
from opt_distributed.comm.threads import ThreadComm
from opt_stack import ConfigError, GradientError, OptimizerConfig, get_optimizer

# Names and positional parameters as Megatron-Core documents them; `=` marks those that have a default.
SIGNATURES = {
    "_matches": "param param_name param_key",
    "_get_param_groups": "model_chunks config config_overrides",
    "_get_param_groups_and_buffers": ("model_chunks model_chunk_offset config config_overrides filter_fn buffer_name"),
    "_get_megatron_optimizer_based_on_param_groups": (
        "config model_chunks param_groups per_model_buffers= model_parallel_group= data_parallel_group= "
        "data_parallel_group_gloo= data_parallel_group_idx= intra_dist_opt_group= distributed_optimizer_instance_id="
    ),
    "get_megatron_optimizer": (
        "config model_chunks config_overrides= use_gloo_process_groups= pg_collection= dump_param_to_param_group_map="
    ),
    "param_group_override_to_tuple": "param_group_override",
    "combine_param_group_overrides": "param_group_overrides",
    "OptimizerParamScheduler": (
        "optimizer init_lr max_lr min_lr lr_warmup_steps lr_decay_steps lr_decay_style start_wd end_wd wd_incr_steps "
        "wd_incr_style use_checkpoint_opt_param_scheduler= override_opt_param_scheduler= wsd_decay_steps= "
        "lr_wsd_decay_style="
    ),
    "get_optim_param_to_id_map": "optim_params_iter",
    "get_param_id_to_sharded_param_map": "model_sharded_state_dict optim_params_iter",
    "make_sharded_optimizer_tensor": "model_param optim_param prefix",
    "optim_state_to_sharding_state": "optim_state_dict id_to_sharded_param_map exclude_keys=",
    "ParamPredicate": "name fn",
    "ParamWithNamePredicate": "name fn",
    "ParamKey": "name= attr= predicate= with_name_predicate=",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_positional_parameters_are_megatron_cores(name: str) -> None:
    parameters = inspect.signature(getattr(megatron, name)).parameters.values()
    message = [f"{p.name}{'=' * (p.default is not p.empty)}" for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert " ".join(message) == SIGNATURES[name]


def test_a_key_matches_by_the_name_that_is_given() -> None:
    param = nn.Parameter(torch.zeros(3))
    key = megatron.ParamKey(name="*.bias")
    assert megatron._matches(param, "layers.0.bias", key)
    assert not megatron._matches(param, "layers.0.weight", key)


def test_a_script_for_megatron_core_runs_with_changed_imports() -> None:
    """The loop that Megatron-Core's users write: configuration, overrides, optimizer, scheduler, training, resume."""

    def setup(model: nn.Module) -> tuple[Any, Any]:
        config = megatron.OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-3, weight_decay=0.1, bf16=True)
        overrides = {megatron.ParamKey(name="2.*"): megatron.ParamGroupOverride(max_lr=5e-3, min_lr=5e-4, wd_mult=0.5)}
        optimizer = megatron.get_megatron_optimizer(config, [model], overrides, use_gloo_process_groups=True)
        scheduler = megatron.OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=1e-3,
            lr_warmup_steps=2 * 8,
            lr_decay_steps=10 * 8,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        return optimizer, scheduler

    def iterate(model: nn.Module, optimizer: Any, scheduler: Any, steps: range) -> list[float]:
        norms = []
        for step in steps:
            optimizer.zero_grad(set_to_none=True)
            backward(model, step, scale=optimizer.scale_loss)
            update_successful, grad_norm, _ = optimizer.step()
            assert update_successful
            norms.append(grad_norm)
            scheduler.step(increment=8)
        return norms

    model = make_model(torch.bfloat16)
    again = make_model(torch.bfloat16)
    optimizer, scheduler = setup(model)
    iterate(model, optimizer, scheduler, range(3))
    other, other_scheduler = setup(again)
    again.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other_scheduler.load_state_dict(scheduler.state_dict())
    assert iterate(again, other, other_scheduler, range(3, 6)) == iterate(model, optimizer, scheduler, range(3, 6))
    assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in optimizer.param_groups]
    assert optimizer.param_groups[1]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"] / 2)


DDP = megatron.DistributedDataParallelConfig
WRAP = megatron.DistributedDataParallel
ORDERS: dict[str, Any] = {
    "Megatron-Core's order": lambda model, config: WRAP(SimpleNamespace(), config, model),
    "its keywords": lambda model, config: WRAP(config=SimpleNamespace(), ddp_config=config, module=model),
    "our order": lambda model, config: WRAP(config, model),
    "our keywords": lambda model, config: WRAP(config, module=model),
}


@pytest.mark.parametrize("wrap", ORDERS.values(), ids=ORDERS)
def test_the_wrapper_takes_both_orders_and_trains(wrap: Any) -> None:
    model = make_model()
    plain = make_model()
    config = DDP(bucket_size=10)
    chunk = wrap(model, config)
    assert isinstance(chunk, opt_stack.DistributedDataParallel)
    assert (chunk.module, chunk.ddp_config) == (model, config)
    for net in (chunk, plain):
        optimizer = megatron.get_megatron_optimizer(megatron.OptimizerConfig(lr=0.1), [net])
        backward(net, 0)
        optimizer.step()
    assert_equal(weights(model), weights(plain))


def test_schedules_find_the_configuration_of_the_transformer() -> None:
    """Megatron-Core's schedules read the first `config` from outside inwards; it was that of the wrapper."""
    model = Attention()
    config = SimpleNamespace(timers=None)
    given = WRAP(config, DDP(), Attention())
    assert given.config is config
    of_module = WRAP(DDP(), model)
    assert of_module.config is model.config
    assert not hasattr(WRAP(DDP(), make_model()), "config")
    ours = opt_stack.DistributedDataParallel(DDP(overlap_grad_reduce=True), Attention())
    assert not hasattr(ours, "config")
    assert ours.ddp_config.overlap_grad_reduce


def test_arguments_in_no_order_are_refused() -> None:
    model: Any = make_model()
    ours: Any = SimpleNamespace()
    order = "(SimpleNamespace, Sequential, DistributedDataParallelConfig): write DistributedDataParallel(config"
    twice = "(DistributedDataParallelConfig, DistributedDataParallelConfig, Sequential"
    mistakes: list[tuple[Any, str]] = [
        (lambda: WRAP(ours, model, DDP()), order),
        (lambda: WRAP(DDP()), "write DistributedDataParallel"),
        (lambda: WRAP(DDP(), DDP(), model), twice),
        (lambda: WRAP(ours, ours, model), "with ddp_config of opt_stack.DistributedDataParallelConfig"),
        (lambda: WRAP(ours, DDP(), model, full_param_layout=object()), "full_param_layout is planned by the wrapper"),
        (lambda: megatron.finalize_model_grads([model]), "wrap it in DistributedDataParallel, or leave plain modules"),
    ]
    for call, message in mistakes:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_one_collective_reduces_a_chunk_without_buckets() -> None:
    config = DDP(overlap_grad_reduce=True, bucket_size=4)
    chunk = WRAP(SimpleNamespace(), config, make_model(), True)
    bucketed = WRAP(SimpleNamespace(), config, make_model())
    assert (len(chunk.grad_sync.buckets), len(bucketed.grad_sync.buckets)) == (1, 3)
    assert config.bucket_size == 4


def test_virtual_pipeline_stages_are_numbered_by_their_modules() -> None:
    first = make_model()
    second = make_model()
    second.vp_stage = 1  # type: ignore[assignment]
    chunks = [WRAP(SimpleNamespace(), DDP(), model) for model in (first, second)]
    optimizer = megatron.get_megatron_optimizer(megatron.OptimizerConfig(lr=0.1), chunks)
    assert {id.chunk for group in optimizer.param_groups for id in group["param_ids"]} == {0, 1}


@pytest.mark.parametrize("forced", [False, True], ids=["reduced", "forced all-reduce"])
def test_summed_losses_are_divided_by_the_tokens_of_all_ranks(forced: bool) -> None:
    """A forced all-reduce leaves them whole on every rank."""

    def rank_main(comm: ThreadComm) -> torch.Tensor:
        model = nn.Linear(3, 1, bias=False)
        per_token = SimpleNamespace(calculate_per_token_loss=True)
        config = DDP(use_distributed_optimizer=forced)
        chunk = WRAP(per_token, config, model, pg_collection=over(comm))
        assert chunk.calculate_per_token_loss
        chunk(torch.full((comm.rank + 1, 3), 6.0)).sum().backward()
        megatron.finalize_model_grads([chunk], torch.tensor(comm.rank + 1), force_all_reduce=forced)
        return main_grad(model.weight).clone()

    for grad in run_threads(2, rank_main):
        assert grad.tolist() == [[6.0] * 3]  # (1 + 2) rows of 6, over 3 tokens


def test_options_of_finalize_come_from_the_transformer_config(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr("opt_stack.megatron.names.finalize", lambda *args, **options: found.update(options))
    transformer = SimpleNamespace(qk_layernorm=True, moe_router_bias_update_rate=0.5)
    chunk = WRAP(transformer, DDP(), make_model())
    megatron.finalize_model_grads([chunk])
    assert found == {"router_bias_update_rate": 0.5}
    assert chunk.qk_layernorm  # the default of `finalize`
    megatron.finalize_model_grads([chunk], qk_layernorm=False)
    assert found["qk_layernorm"] is False


SHARDED = {"DistributedOptimizer", "MixedPrecisionOptimizer"}
KINDS: list[tuple[dict[str, Any], set[str]]] = [
    ({}, {"FP32Optimizer"}),
    ({"bf16": True}, {"MixedPrecisionOptimizer", "Float16OptimizerWithFloat16Params"}),
    ({"use_distributed_optimizer": True}, SHARDED),
    ({"use_distributed_optimizer": True, "bf16": True}, SHARDED),
    ({"optimizer": "muon", "use_layer_wise_distributed_optimizer": True}, {"LayerWiseDistributedOptimizer"}),
]


def test_isinstance_answers_as_in_megatron_core() -> None:
    names = {"ChainedOptimizer"}.union(*(expected for _, expected in KINDS))
    stranger = torch.optim.SGD(make_model().parameters(), 0.1)
    for fields, expected in KINDS:
        config = megatron.OptimizerConfig(lr=0.1, **fields)
        optimizer = megatron.get_megatron_optimizer(config, [make_model(config.precision.params)])
        assert {name for name in names if isinstance(optimizer, getattr(megatron, name))} == expected, fields
        assert isinstance(optimizer, megatron.MegatronOptimizer)
    for name in names:
        with pytest.raises(opt_stack.ConfigError, match=f"{name} is not built directly; call opt_stack.megatron.get_"):
            getattr(megatron, name)([])
        assert not isinstance(stranger, getattr(megatron, name))


def test_the_muon_getter_builds_muon_and_refuses_adam() -> None:
    config = megatron.OptimizerConfig(optimizer="muon", lr=0.1)
    plain = megatron.get_megatron_muon_optimizer(config, [make_model()])
    layer_wise = megatron.get_megatron_muon_optimizer(config, [make_model()], layer_wise_distributed_optimizer=True)
    assert not isinstance(plain, megatron.LayerWiseDistributedOptimizer)
    assert isinstance(layer_wise, megatron.LayerWiseDistributedOptimizer)
    assert not config.use_layer_wise_distributed_optimizer
    with pytest.raises(opt_stack.ConfigError, match="optimizer='adam': get_megatron_muon_optimizer builds rules of"):
        megatron.get_megatron_muon_optimizer(megatron.OptimizerConfig(lr=0.1), [make_model()])


# Modules of Megatron-Core 0.19.2 with their public names; the first row is megatron.core.optimizer and .distributed.
MODULES = {
    "": "AdamOptimizerConfig ChainedOptimizer ConstantGradScaler DistributedDataParallel DistributedOptimizer "
    "DistributedDataParallelConfig DynamicGradScaler FP32Optimizer Float16OptimizerWithFloat16Params "
    "FullyShardedDataParallel HybridDeviceOptimizer LayerWiseDistributedOptimizer MegatronOptimizer OptimizerConfig "
    "ParamGroupOverride ParamKey ParamPredicate ParamWithNamePredicate ProcessGroupCollection SGDOptimizerConfig "
    "TorchFullyShardedDataParallel TorchFullyShardedDataParallelConfig check_config_overrides_consistency "
    "combine_param_group_overrides finalize_model_grads get_megatron_muon_optimizer get_megatron_optimizer "
    "get_mup_config_overrides get_standard_config_overrides param_group_identifier_keys "
    "param_group_override_to_tuple",
    "clip_grads": "get_grad_norm_fp32 clip_grad_by_total_norm_fp32 count_zeros_fp32",
    "distrib_optimizer": "DistributedOptimizer",
    "distributed_data_parallel": "DistributedDataParallel",
    "distributed_data_parallel_config": "DistributedDataParallelConfig",
    "emerging_optimizers": "TensorParallelMuon TensorParallelAdaptiveMuon",
    "grad_scaler": "MegatronGradScaler ConstantGradScaler DynamicGradScaler",
    "layer_wise_optimizer": "LayerWiseDistributedOptimizer",
    "muon": "get_megatron_muon_optimizer",
    "optimizer": "MegatronOptimizer MixedPrecisionOptimizer Float16OptimizerWithFloat16Params FP32Optimizer "
    "ChainedOptimizer param_group_identifier_keys",
    "optimizer_config": "OptimizerConfig AdamOptimizerConfig SGDOptimizerConfig ParamKey ParamPredicate "
    "ParamWithNamePredicate",
    "optimizer_cuda_graph": "OptimizerCudaGraphWrapper",
    "optimizer_param_scheduler": "OptimizerParamScheduler ParamGroupOverride combine_param_group_overrides "
    "get_canonical_lr_for_logging param_group_override_to_tuple",
    "qk_clip": "clip_qk",
}


def test_names_of_megatron_core_exist_or_name_a_substitute() -> None:
    for name, names in MODULES.items():
        module = import_module(f"opt_stack.megatron.{name}".rstrip("."))
        for public in names.split():
            if public in megatron.__all__:
                assert getattr(module, public) is getattr(megatron, public)
            else:
                with pytest.raises(ImportError, match=f"opt_stack.megatron has no {public}; "):
                    getattr(module, public)
    assert set(SIGNATURES) <= set(megatron.__all__)
    assert not hasattr(megatron, "ParamKeys")


ASKS: dict[str, dict[str, Any]] = {
    "use_distributed_optimizer": {"optimizer": "muon", "use_distributed_optimizer": True},
    "dist_muon": {"optimizer": "dist_muon"},
    "both": {"optimizer": "dist_muon", "use_distributed_optimizer": True},
    "soap": {"optimizer": "soap", "use_distributed_optimizer": True},
}


@pytest.mark.parametrize("name", ASKS)
def test_a_sharded_rule_of_matrices_is_layer_wise(name: str) -> None:
    config = megatron.OptimizerConfig(lr=0.1, **ASKS[name])
    optimizer = megatron.get_megatron_optimizer(config, [make_model()])
    assert isinstance(optimizer, megatron.LayerWiseDistributedOptimizer)
    assert {group["optimizer"] for group in optimizer.param_groups} == {"soap" if name == "soap" else "muon", "adam"}
    wrapped = WRAP(DDP(use_distributed_optimizer=True), make_model(), optimizer_config=config)
    buffers = megatron.get_megatron_optimizer(config, [wrapped]).plan.buffers
    assert any("whole parameters" in buffer.name for buffer in buffers)
    groups = megatron._get_param_groups([make_model()], config, None)
    assert [group["optimizer"] for group in groups] == [group["optimizer"] for group in optimizer.param_groups]
    with pytest.raises(opt_stack.ConfigError):
        opt_stack.get_optimizer(config, [make_model()])  # without Megatron-Core's meaning
    with pytest.raises(opt_stack.ConfigError, match="optimizer='dist_adam' is unknown"):
        megatron.get_megatron_optimizer(megatron.OptimizerConfig(optimizer="dist_adam"), [make_model()])


def test_gradients_are_clipped_and_counted_as_in_megatron_core() -> None:
    grads = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0, 0.0]])]
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    assert megatron.get_grad_norm_fp32(grads) == 5.0
    assert megatron.get_grad_norm_fp32(grads, 1) == 7.0
    assert megatron.get_grad_norm_fp32(grads, float("inf")) == 4.0
    assert megatron.get_grad_norm_fp32(grads, norm_type="inf") == 4.0
    assert megatron.get_grad_norm_fp32([]) == 0.0
    assert megatron.count_zeros_fp32(params) == 2
    params[0].shared = True  # type: ignore[attr-defined]
    assert megatron.count_zeros_fp32(params) == 1
    megatron.clip_grad_by_total_norm_fp32(params, 10.0, 5.0)
    assert params[1].grad is not None
    assert torch.equal(params[1].grad, grads[1])
    megatron.clip_grad_by_total_norm_fp32(params, 1.0, 5.0)
    torch.testing.assert_close(params[1].grad, grads[1] / 5)


def test_the_optimizer_gives_the_gradients_that_its_norm_counts() -> None:
    model = make_model(torch.bfloat16)
    optimizer = megatron.get_megatron_optimizer(megatron.OptimizerConfig(lr=0.1, bf16=True, loss_scale=4.0), [model])
    optimizer.prepare_model_params_for_param_sync()
    with pytest.raises(RuntimeError, match="no gradients are ready"):
        optimizer.get_grads_for_grad_norm()
    backward(model, 0, scale=optimizer.scale_loss)
    optimizer.prepare_grads()
    grads = optimizer.get_grads_for_grad_norm()
    assert megatron.get_grad_norm_fp32(grads) == pytest.approx(optimizer.get_grad_norm(), rel=1e-5)
    assert optimizer.get_grads_for_grad_norm("mtp") == []
    assert not optimizer.has_grad_norm_group(grad_norm_group="mtp")
    with pytest.raises(ValueError, match="grad_norm_group 'heads': allowed are"):
        optimizer.get_grads_for_grad_norm("heads")


def test_an_override_names_the_rule_of_its_parameters() -> None:
    config = megatron.OptimizerConfig(lr=0.1, optimizer="sgd")
    overrides = {
        megatron.ParamKey(name="0.weight"): megatron.ParamGroupOverride(optimizer="adamw"),
        megatron.ParamKey(name="2.weight"): megatron.ParamGroupOverride(optimizer="lion", wd_mult=0.5),
    }
    optimizer = megatron.get_megatron_optimizer(config, [make_model()], overrides)
    rule_of = {str(id): group["optimizer"] for group in optimizer.param_groups for id in group["param_ids"]}
    assert rule_of == {"0.weight": "adam", "0.bias": "sgd", "2.weight": "lion", "2.bias": "sgd"}
    coupled = megatron.OptimizerConfig(lr=0.1, decoupled_weight_decay=False)
    with pytest.raises(opt_stack.ConfigError, match="optimizer='adamw': contradicts decoupled_weight_decay=False"):
        megatron.get_megatron_optimizer(coupled, [make_model()], overrides)


class DistributedDataParallel(nn.Module):
    """Gradients accumulate in `main_grad`, and `param.grad` stays None."""

    __module__ = "megatron.core.distributed.distributed_data_parallel"

    def __init__(self, module: nn.Module, **fields: Any) -> None:
        super().__init__()
        self.module = module
        self.ddp_config = SimpleNamespace(use_distributed_optimizer=False, **fields)
        self.buffers: Any = []  # as in Megatron-Core, in place of the method
        for param in module.parameters():
            param.main_grad = torch.zeros(param.shape)  # type: ignore[attr-defined]
            param.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def _take(self, param: Any) -> None:
        param.main_grad.add_(param.grad)
        param.grad = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x)
        return y

    def zero_grad_buffer(self) -> None:
        for param in self.module.parameters():
            param.main_grad.zero_()  # type: ignore[operator, union-attr]


WHOLE = {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True}


@pytest.mark.parametrize("fields", [{}, {"bf16": True}, {"optimizer": "muon"}, WHOLE], ids=str)
def test_the_step_reads_the_reduced_gradients(fields: dict[str, Any]) -> None:
    config = OptimizerConfig(lr=0.1, clip_grad=0.25, **fields)
    model = make_model(config.precision.params)
    plain = make_model(config.precision.params)
    chunk = DistributedDataParallel(model)
    optimizer = get_optimizer(config, [chunk])
    expected = get_optimizer(config, [plain])
    for step in range(3):
        chunk.zero_grad_buffer()
        backward(chunk, step)
        expected.zero_grad()
        backward(plain, step)
        assert optimizer.step() == expected.step()
    assert_equal(weights(model), weights(plain))
    assert not torch.equal(model[0].weight, make_model(config.precision.params)[0].weight)  # type: ignore[index]


def test_a_parameter_without_its_gradient_is_refused() -> None:
    chunk = DistributedDataParallel(make_model())
    optimizer = get_optimizer(OptimizerConfig(lr=0.1), [chunk])
    del chunk.module[0].weight.main_grad  # type: ignore[index]
    before = weights(chunk)
    with pytest.raises(GradientError, match=r"main_grad of 0\.weight is None; the wrapper of this"):
        optimizer.step()
    assert_equal(weights(chunk), before)


ANOTHER = "is a Sequential; wrap all chunks in the same class"
FLAT = {"use_distributed_optimizer": True}


def test_what_the_wrapper_does_not_support_is_refused() -> None:
    chunk = DistributedDataParallel(make_model())
    shards = DistributedDataParallel(make_model())
    plain = make_model()
    shards.ddp_config.use_distributed_optimizer = True
    refused: list[tuple[dict[str, Any], list[nn.Module], str]] = [
        (FLAT, [chunk], "use_distributed_optimizer=True: model chunk 0 is in Megatron-Core's .* set it to False"),
        (WHOLE, [WRAP(DDP(), make_model()), plain], "is a plain Sequential, but others are in wrappers"),
        ({"optimizer_cuda_graph": True}, [chunk], "optimizer_cuda_graph=True: model chunk 0"),
        ({}, [chunk.module], "pass the DistributedDataParallel around it"),
        ({}, [shards], "leaves each rank a shard of the gradients in its own layout; wrap"),
        ({}, [chunk, plain], f"and model chunk 1 {ANOTHER}"),
        ({}, [plain, chunk], f"and model chunk 0 {ANOTHER}"),
    ]
    for fields, chunks, message in refused:
        with pytest.raises(ConfigError, match=message):
            get_optimizer(OptimizerConfig(lr=0.1, **fields), chunks)


class Attention(nn.Module):
    """A model of Megatron-Core's kind: two query groups in one projection, and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=2)
        self.position_embeddings = nn.Embedding(6, 8)
        self.linear_qkv = nn.Linear(8, 16)
        for param in self.parameters():
            nn.init.uniform_(param, generator=torch.Generator().manual_seed(1))

    def forward(self) -> Tensor:
        return self.linear_qkv(self.position_embeddings.weight).square().sum()


def muon_of(model: nn.Module, build: Any, **fields: Any) -> Any:
    config = OptimizerConfig(lr=0.1, optimizer="muon", muon_fp32_matmul_prec="highest", **fields)
    optimizer = build(config, [model])
    model().backward()
    optimizer.step()
    return optimizer


def test_fused_qkv_and_positions_are_moved_as_in_megatron_core() -> None:
    found = Attention()
    marked = Attention()
    del marked.config
    marked.linear_qkv.weight.qkv_split_shapes = (4, 2, 2)
    marked.position_embeddings.weight.is_embedding_or_output_parameter = False
    muon_of(found, megatron.get_megatron_optimizer)
    muon_of(marked, get_optimizer)
    assert_equal(weights(found), weights(marked))
    kept = Attention()
    muon_of(kept, get_optimizer)
    assert torch.equal(kept.linear_qkv.weight, found.linear_qkv.weight)
    assert not torch.equal(kept.position_embeddings.weight, found.position_embeddings.weight)


@pytest.mark.parametrize(("wrapper", "num_whole"), [(megatron, 2), (opt_stack, 1)])
def test_a_wrapper_lays_positions_out_as_megatron_core(wrapper: Any, num_whole: int) -> None:
    """Layer-wise: Muon's matrices are whole, and Megatron-Core's positions are Muon's."""
    model = Attention()  # made before ranks start: threads share torch's generator

    def wrapped(comm: ThreadComm) -> int:
        chunk = wrapper.DistributedDataParallel(
            opt_stack.DistributedDataParallelConfig(use_distributed_optimizer=True),
            copy.deepcopy(model),
            groups=over(comm),
            optimizer_config=OptimizerConfig(lr=0.1, optimizer="muon", use_layer_wise_distributed_optimizer=True),
        )
        return sum(len(buffer.params) for buffer in chunk.synced_buffers if not buffer.plan.kind.cuts)

    assert run_threads(2, wrapped) == [num_whole, num_whole]


@pytest.mark.parametrize(("fields", "is_said"), [({}, True), ({"muon_split_qkv": False}, False)], ids=str)
def test_the_plan_says_that_no_fused_qkv_was_found(fields: dict[str, Any], is_said: bool) -> None:
    optimizer = get_optimizer(OptimizerConfig(lr=0.1, optimizer="muon", **fields), [make_model()])
    assert ("no fused q, k and v found to split" in str(optimizer.plan)) is is_said
    found = get_optimizer(OptimizerConfig(lr=0.1, optimizer="muon", **fields), [Attention()])
    assert "no fused q, k and v" not in str(found.plan)


LAYOUTS_OF_WRAPPERS = {
    "the script's, without a layout": {},
    "the script's layout": {"full_param_layout": megatron.LayerWiseDistributedOptimizer.compute_full_param_layout()},
    "ours": {"optimizer_config": OptimizerConfig(lr=0.1, **WHOLE)},
}


def trained_layer_wise(comm: ThreadComm, model: nn.Module, options: dict[str, Any]) -> tuple[Any, Any]:
    """The weights after three steps of layer-wise Muon in Megatron-Core's order of arguments, and the optimizer."""
    sharded = bool(options)
    ddp_config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=sharded, overlap_grad_reduce=True)
    module = copy.deepcopy(model)
    chunk = WRAP(SimpleNamespace(), ddp_config, module, pg_collection=over(comm), **options)
    optimizer = megatron.get_megatron_optimizer(
        megatron.OptimizerConfig(lr=0.1, clip_grad=0.5, muon_fp32_matmul_prec="highest", **WHOLE),
        [chunk],
        pg_collection=over(comm),
    )
    for step in range(3):
        optimizer.zero_grad()
        backward(chunk, 2 * step + comm.rank)
        optimizer.step()
    return weights(module), optimizer


def test_layer_wise_works_in_a_wrapper_that_was_not_told() -> None:
    """As the training script builds it. It was refused: "OptimizerConfig has use_distributed_optimizer=True"."""
    model = make_model()
    found = {}
    for name, options in LAYOUTS_OF_WRAPPERS.items():
        ranks = run_threads(2, lambda comm, options=options: trained_layer_wise(comm, model, options))
        found[name] = ranks[0][0]
        assert_equal(ranks[1][0], ranks[0][0])
        own = [{id for id, held in optimizer._held.items() if held.unit.rule.name == "muon"} for _, optimizer in ranks]
        assert own[0].isdisjoint(own[1])
        assert all(optimizer.has_rank_local_state for _, optimizer in ranks)
    for other in found.values():
        assert_equal(other, found["ours"])


# --- what Megatron-LM's training script passes and calls --------------------------------------------------------------


def test_defaults_of_the_command_line_are_warnings_here_only(caplog: pytest.LogCaptureFixture) -> None:
    of_script = {"optimizer_offload_fraction": 1.0, "fp8_recipe": "delayed", "muon_momentum": 0.9}
    with pytest.warns(match="without effect in this configuration: optimizer_offload_fraction=1.0"):
        config = megatron.OptimizerConfig(lr=0.1, **of_script)
    with pytest.warns(match="without effect .* data_parallel_sharding_strategy='optim_grads_params'"):
        ddp_config = megatron.DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    megatron.get_megatron_optimizer(config, [WRAP(SimpleNamespace(), ddp_config, make_model())])
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "fp8_recipe='delayed': without effect, because no parameter is stored in fp8 on any rank"
    ]
    with pytest.warns(match="without effect in this configuration: fp8_recipe='delayed'"):
        megatron.OptimizerConfig(lr=0.1, optimizer_cpu_offload=True, **of_script)
    with pytest.raises(ConfigError, match="optimizer_offload_fraction"):
        OptimizerConfig(lr=0.1, optimizer_offload_fraction=1.0)
    with pytest.raises(ConfigError, match="data_parallel_sharding_strategy"):
        opt_stack.DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    with pytest.raises(ConfigError, match="no parameter is stored in fp8"):
        get_optimizer(OptimizerConfig(lr=0.1, fp8_recipe="delayed"), [make_model()])


SHARDED = {
    "flat": {"use_distributed_optimizer": True},
    "whole": WHOLE,
    "replicated": {},
}


@pytest.mark.parametrize("fields", SHARDED.values(), ids=SHARDED)
def test_the_script_saves_and_resumes_in_its_format_torch(fields: dict[str, Any], tmp_path: Path) -> None:
    """All ranks load the `state_dict` of the first; sharded state has files of its own. It died at the first save."""
    model = make_model()

    def built(comm: ThreadComm) -> tuple[nn.Module, Any]:
        own = copy.deepcopy(model)
        config = megatron.OptimizerConfig(lr=0.1, **fields)
        return own, megatron.get_megatron_optimizer(config, [own], pg_collection=over(comm))

    def iterate(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()

    def resumed(comm: ThreadComm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        unbroken, optimizer = built(comm)
        for step in range(3):
            iterate(unbroken, optimizer, step)
        of_ranks = comm.gather_objects(copy.deepcopy(optimizer.state_dict()))
        is_whole = "use_layer_wise_distributed_optimizer" in fields
        if is_whole:
            optimizer.save_state_dict_to_file(str(tmp_path / f"layer_wise_optimizer_{comm.rank}.pt"))
        elif fields:
            optimizer.save_parameter_state(str(tmp_path / "distrib_optim.pt"))
        again, other = built(comm)
        again.load_state_dict(weights(unbroken))
        if is_whole:
            other.load_state_dict_from_file(str(tmp_path / f"layer_wise_optimizer_{comm.rank}.pt"))
        else:
            other.load_state_dict(of_ranks[0])
        if fields and not is_whole:
            with pytest.raises(RuntimeError, match="call load_parameter_state"):
                other.step()
            other.load_parameter_state(str(tmp_path / "distrib_optim.pt"))
        for step in range(3, 5):
            iterate(unbroken, optimizer, step)
            iterate(again, other, step)
        return weights(again), weights(unbroken)

    for found, wanted in run_threads(2, resumed):
        assert_equal(found, wanted)


def test_a_file_that_one_rank_lacks_is_an_error_of_all(tmp_path: Path) -> None:
    """The others waited for it."""
    model = make_model()

    def load(comm: ThreadComm) -> str:
        config = megatron.OptimizerConfig(lr=0.1, use_distributed_optimizer=True)
        optimizer = megatron.get_megatron_optimizer(config, [copy.deepcopy(model)], pg_collection=over(comm))
        if comm.rank == 0:
            optimizer.save_parameter_state(str(tmp_path / "distrib_optim.pt"))
        comm.gather_objects("saved")
        with pytest.raises((OSError, ValueError)) as caught:
            optimizer.load_parameter_state(str(tmp_path / "distrib_optim.pt"))
        return str(caught.value)

    assert all("distrib_optim.pt.1" in error for error in run_threads(2, load))


class Core(nn.Module):
    current_max_attn_logits: Tensor | None = None


def test_clip_qk_clips_by_the_logits_of_the_layers() -> None:
    model = Attention()
    model.core_attention = Core()
    vars(model.config).update(qk_clip_threshold=10.0, qk_clip_alpha=0.5)
    chunk = WRAP(model.config, DDP(), model)
    optimizer = megatron.get_megatron_optimizer(megatron.OptimizerConfig(lr=0.1, optimizer="sgd"), [chunk])
    before = model.linear_qkv.weight.detach().clone()
    logits = torch.tensor([1.0, 2.0, 40.0, 5.0])
    model.core_attention.current_max_attn_logits = logits
    assert megatron.qk_clip.clip_qk([chunk], log_max_only=True) == 40.0
    assert torch.equal(model.linear_qkv.weight, before)
    assert model.core_attention.current_max_attn_logits is None
    model.core_attention.current_max_attn_logits = logits
    assert megatron.qk_clip.clip_qk([chunk]) == 40.0
    factors = torch.ones(16, 1)
    factors[8:14] = 0.5  # queries and keys of the second group: sqrt(10 / 40)
    torch.testing.assert_close(model.linear_qkv.weight, before * factors)
    assert megatron.qk_clip.clip_qk([chunk]) == 0.0  # no layer has seen logits
    assert optimizer.wrapped == (chunk,)  # a chunk does not keep it alive
    with pytest.raises(ConfigError, match="that one optimizer trains"):
        megatron.qk_clip.clip_qk([model])


def test_the_wrapper_passes_the_scripts_calls_on_to_the_module() -> None:
    model = Attention()
    calls: list[str] = []
    model.sharded_state_dict = lambda prefix, metadata: calls.append(f"{prefix} {metadata}")
    model.state_dict_for_save_checkpoint = lambda: calls.append("whole")
    model.set_is_first_microbatch = lambda: calls.append("first")
    chunk = WRAP(model.config, DDP(), model)
    chunk.sharded_state_dict("a.", metadata=1)
    chunk.state_dict_for_save_checkpoint()
    chunk.set_is_first_microbatch()
    chunk.reset_param_sync_dispatch_state()
    chunk.free_overlap_buffers()
    assert calls == ["a. 1", "whole", "first"]
    assert chunk.buffers + chunk.expert_parallel_buffers == list(chunk.synced_buffers)


def test_the_script_may_wrap_a_step_for_graphs() -> None:
    step = lambda: None
    assert megatron.optimizer_cuda_graph.OptimizerCudaGraphWrapper(step, cuda_graph_warmup_steps=3) is step
    assert megatron.layer_wise_optimizer.tag_params_for_buffer_routing([make_model()]) is None
    assert "max_lr" in megatron.optimizer.param_group_identifier_keys
    assert megatron.distrib_optimizer.DistributedOptimizer.compute_full_param_layout([], None, 2, None) is None


@pytest.mark.parametrize("rule", ["lion", "laprop"])
def test_some_rules_move_matrices_only_with_the_betas_of_adam(rule: str) -> None:
    """They moved everything, with betas of their own: weights differed by 7.5e-2 after six steps."""
    found = Attention()
    wanted = Attention()
    given = megatron.OptimizerConfig(lr=0.1, optimizer=rule, adam_beta1=0.8, adam_beta2=0.95)
    optimizer = megatron.get_megatron_optimizer(given, [found])
    config = OptimizerConfig(lr=0.1, optimizer=rule, adam_beta1=0.8, adam_beta2=0.95, lion_beta1=0.8, lion_beta2=0.95)
    biases = {megatron.ParamKey(name="*.bias"): {"optimizer": "adam", "wd_mult": 0.0}}
    wanted.position_embeddings.weight.is_embedding_or_output_parameter = False
    expected = get_optimizer(config, [wanted], biases)
    for _ in range(3):
        for model, own in ((found, optimizer), (wanted, expected)):
            own.zero_grad()
            model().backward()
            own.step()
    assert_equal(weights(found), weights(wanted))
    assert given.lion_beta1 == OptimizerConfig().lion_beta1


def test_the_callers_embedding_rates_replace_the_decoupled_ones() -> None:
    """Megatron-Core takes them; they were refused with the advice to pass just these."""
    config = megatron.OptimizerConfig(lr=0.1, decoupled_lr=0.5)
    own = {megatron.ParamKey(attr="is_embedding_or_output_parameter"): {"max_lr": 0.3}}
    model = make_model()
    model[0].weight.is_embedding_or_output_parameter = True
    overrides = {**megatron.get_standard_config_overrides(config), **own}
    optimizer = megatron.get_megatron_optimizer(config, [model], overrides)
    assert sorted({group["max_lr"] for group in optimizer.param_groups}) == [0.1, 0.3]


def test_functions_are_found_where_megatron_core_has_them() -> None:
    finalize = import_module("opt_stack.megatron.finalize_model_grads")
    assert finalize.finalize_model_grads is megatron.finalize_model_grads
    with pytest.raises(ImportError, match=r"EmergingOptimizerEntry; register a rule of your own"):
        megatron.emerging_optimizers.EmergingOptimizerEntry  # noqa: B018
