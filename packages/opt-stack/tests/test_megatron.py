"""Megatron-Core's names, classes, argument orders, modules and wrappers in `opt_stack.megatron`."""

import inspect
import logging
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stack_models import backward, make_model, weights
from torch import Tensor, nn

import opt_stack
import opt_stack.megatron as megatron
from opt_distributed import run_threads
from opt_distributed.buffers.main_grad import main_grad
from opt_distributed.comm import Alone, Axes, Roles
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


def test_everything_that_is_promised_is_there() -> None:
    assert set(SIGNATURES) <= set(megatron.__all__)
    assert all(hasattr(megatron, name) for name in megatron.__all__)
    methods = ("get_wd", "get_lr", "step", "state_dict", "_check_and_set", "load_state_dict")
    assert all(inspect.isfunction(getattr(megatron.OptimizerParamScheduler, method)) for method in methods)
    assert isinstance(megatron.logger, logging.Logger)
    assert "keep_vars=True" in megatron.KEEP_VARS_HINT


def test_a_key_matches_as_megatron_cores_function_does() -> None:
    param = nn.Parameter(torch.zeros(3))
    assert megatron._matches(param, "layers.0.bias", megatron.ParamKey(name="*.bias"))
    assert not megatron._matches(param, "layers.0.weight", megatron.ParamKey(name="*.bias"))


def test_a_script_for_megatron_core_runs_after_changing_its_imports() -> None:
    """The loop that Megatron-Core's users write: configuration, overrides, optimizer, scheduler, training, resume."""
    from opt_stack.megatron import (
        OptimizerConfig,
        OptimizerParamScheduler,
        ParamGroupOverride,
        ParamKey,
        get_megatron_optimizer,
    )

    def setup(model: nn.Module) -> tuple[Any, Any]:
        config = OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=1e-3, weight_decay=0.1, bf16=True, clip_grad=1.0, adam_beta2=0.95
        )
        overrides = {ParamKey(name="2.*"): ParamGroupOverride(max_lr=5e-3, min_lr=5e-4, wd_mult=0.5)}
        optimizer = get_megatron_optimizer(config, [model], overrides, use_gloo_process_groups=True)
        scheduler = OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.min_lr,
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
        losses = []
        for step in steps:
            optimizer.zero_grad(set_to_none=True)
            backward(model, step, scale=optimizer.scale_loss)
            update_successful, grad_norm, _ = optimizer.step()
            assert update_successful
            losses.append(grad_norm)
            scheduler.step(increment=8)
        return losses

    model = make_model(torch.bfloat16)
    optimizer, scheduler = setup(model)
    iterate(model, optimizer, scheduler, range(3))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr": scheduler.state_dict()}
    saved = {key: {**value} for key, value in saved.items()}
    again = make_model(torch.bfloat16)
    again.load_state_dict(saved["model"])
    other, other_scheduler = setup(again)
    other.load_state_dict(saved["optimizer"])
    other_scheduler.load_state_dict(saved["lr"])
    assert iterate(again, other, other_scheduler, range(3, 6)) == iterate(model, optimizer, scheduler, range(3, 6))
    assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in optimizer.param_groups]
    assert optimizer.param_groups[1]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"] / 2)


DDP = megatron.DistributedDataParallelConfig
ORDERS: dict[str, Any] = {
    "Megatron-Core's order": lambda model, config: megatron.DistributedDataParallel(SimpleNamespace(), config, model),
    "its keywords": lambda model, config: megatron.DistributedDataParallel(
        config=SimpleNamespace(), ddp_config=config, module=model
    ),
    "our order": lambda model, config: megatron.DistributedDataParallel(config, model),
    "our keywords": lambda model, config: megatron.DistributedDataParallel(config, module=model),
}


@pytest.mark.parametrize("wrap", ORDERS.values(), ids=ORDERS)
def test_the_wrapper_takes_both_orders_and_trains(wrap: Any) -> None:
    model, plain, config = make_model(), make_model(), DDP(bucket_size=10)
    chunk = wrap(model, config)
    assert isinstance(chunk, opt_stack.DistributedDataParallel)
    assert (chunk.module, chunk.ddp_config) == (model, config)
    optimizer = megatron.get_megatron_optimizer(megatron.OptimizerConfig(lr=0.1), [chunk])
    expected = megatron.get_megatron_optimizer(megatron.OptimizerConfig(lr=0.1), [plain])
    for one, net in ((optimizer, chunk), (expected, plain)):
        backward(net, 0)
        one.step()
    assert all(torch.equal(weights(model)[name], weight) for name, weight in weights(plain).items())


MISTAKES: dict[str, tuple[Any, str]] = {
    "swapped": (
        lambda model: megatron.DistributedDataParallel(SimpleNamespace(), model, DDP()),  # type: ignore[arg-type]
        r"DistributedDataParallel\(SimpleNamespace, Sequential, DistributedDataParallelConfig\): write "
        r"DistributedDataParallel\(transformer_config, ddp_config, module\)",
    ),
    "no module": (lambda model: megatron.DistributedDataParallel(DDP()), "write DistributedDataParallel"),
    "two configurations": (
        lambda model: megatron.DistributedDataParallel(DDP(), DDP(), model),
        r"DistributedDataParallel\(DistributedDataParallelConfig, DistributedDataParallelConfig, Sequential\)",
    ),
    "another library's configuration": (
        lambda model: megatron.DistributedDataParallel(SimpleNamespace(), SimpleNamespace(), model),  # type: ignore[arg-type]
        "with ddp_config of opt_stack.DistributedDataParallelConfig",
    ),
    "a layout": (
        lambda model: megatron.DistributedDataParallel(SimpleNamespace(), DDP(), model, full_param_layout=object()),  # type: ignore[arg-type]
        "full_param_layout is planned by the wrapper",
    ),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES)
def test_arguments_in_no_order_are_refused(call: Any, message: str) -> None:
    with pytest.raises(opt_stack.ConfigError, match=message):
        call(make_model())


def test_without_buckets_one_collective_reduces_the_chunk_and_the_callers_configuration_is_not_modified() -> None:
    config = DDP(overlap_grad_reduce=True, bucket_size=4)
    chunk = megatron.DistributedDataParallel(SimpleNamespace(), config, make_model(), True)
    bucketed = megatron.DistributedDataParallel(SimpleNamespace(), config, make_model())
    assert (len(chunk.grad_sync.buckets), len(bucketed.grad_sync.buckets)) == (1, 3)
    assert config.bucket_size == 4


def test_stages_of_a_virtual_pipeline_are_numbered_by_their_modules() -> None:
    first, second = make_model(), make_model()
    second.vp_stage = 1  # type: ignore[assignment]
    chunks = [megatron.DistributedDataParallel(SimpleNamespace(), DDP(), model) for model in (first, second)]
    optimizer = megatron.get_megatron_optimizer(megatron.OptimizerConfig(lr=0.1), chunks)
    assert {id.chunk for group in optimizer.param_groups for id in group["param_ids"]} == {0, 1}


def test_losses_that_are_sums_over_tokens_are_divided_by_the_tokens_of_all_ranks() -> None:
    def rank_main(comm: ThreadComm) -> tuple[torch.Tensor, bool]:
        axes = Axes(dp=comm, tp=Alone())
        model = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(model.weight)
        per_token = SimpleNamespace(calculate_per_token_loss=True)
        chunk = megatron.DistributedDataParallel(
            per_token, DDP(), model, pg_collection=Roles(dense=axes, expert=axes, everyone=comm)
        )
        chunk(torch.full((comm.rank + 1, 3), 6.0)).sum().backward()
        megatron.finalize_model_grads([chunk], torch.tensor(comm.rank + 1))
        (buffer,) = chunk.synced_buffers
        (piece,) = buffer.owned()
        return buffer.grad(piece.id, piece.of_param), chunk.calculate_per_token_loss

    for grad, per_token in run_threads(2, rank_main):
        assert per_token
        assert torch.equal(grad.flatten(), torch.full((3,), 6.0))  # (1 + 2) rows of 6, over 3 tokens


def test_options_of_finalize_come_from_the_transformer_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}
    monkeypatch.setattr("opt_stack.megatron.names.finalize", lambda *args, **options: found.update(options))
    transformer = SimpleNamespace(qk_layernorm=True, moe_router_bias_update_rate=0.5)
    chunk = megatron.DistributedDataParallel(transformer, DDP(), make_model())
    megatron.finalize_model_grads([chunk])
    assert found == {"router_bias_update_rate": 0.5}
    assert chunk.qk_layernorm  # the default of `finalize`
    megatron.finalize_model_grads([chunk], qk_layernorm=False)
    assert found["qk_layernorm"] is False


def test_a_chunk_that_is_not_wrapped_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="wrap it in DistributedDataParallel, or leave plain modules to the optimizer"):
        megatron.finalize_model_grads([make_model()])


def test_a_forced_all_reduce_leaves_finalized_gradients_whole_on_every_rank() -> None:
    def rank_main(comm: ThreadComm) -> torch.Tensor:
        axes = Axes(dp=comm, tp=Alone())
        groups = Roles(dense=axes, expert=axes, everyone=comm)
        model = nn.Linear(3, 1, bias=False)
        transformer = SimpleNamespace(calculate_per_token_loss=True)
        chunk = megatron.DistributedDataParallel(transformer, DDP(use_distributed_optimizer=True), model, groups=groups)
        chunk(torch.full((1, 3), 6.0 * (comm.rank + 1))).sum().backward()
        megatron.finalize_model_grads([chunk], torch.tensor(comm.rank + 1), force_all_reduce=True)
        return main_grad(model.weight).clone()

    for grad in run_threads(2, rank_main):
        assert grad.tolist() == [[6.0] * 3]  # (6 + 12) / 3 tokens


KINDS = {
    "ChainedOptimizer": (),
    "DistributedOptimizer": ("flat", "flat bf16"),
    "LayerWiseDistributedOptimizer": ("whole",),
    "MixedPrecisionOptimizer": ("flat", "flat bf16", "bf16"),
    "Float16OptimizerWithFloat16Params": ("bf16",),
    "FP32Optimizer": ("fp32",),
}
CONFIGS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "flat": {"use_distributed_optimizer": True},
    "flat bf16": {"use_distributed_optimizer": True, "bf16": True},
    "whole": {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_isinstance_answers_as_in_megatron_core(name: str) -> None:
    config = megatron.OptimizerConfig(lr=0.1, **CONFIGS[name])  # type: ignore[arg-type]
    optimizer = megatron.get_megatron_optimizer(config, [make_model(config.precision.params)])
    kinds = {kind for kind in KINDS if isinstance(optimizer, getattr(megatron, kind))}
    assert kinds == {kind for kind, names in KINDS.items() if name in names}
    assert isinstance(optimizer, megatron.MegatronOptimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_of_optimizers_is_not_built_directly_and_fits_no_other_optimizer(kind: str) -> None:
    with pytest.raises(opt_stack.ConfigError, match=f"{kind} is not built directly; call opt_stack.megatron.get_meg"):
        getattr(megatron, kind)([])
    assert not isinstance(torch.optim.SGD(make_model().parameters(), 0.1), getattr(megatron, kind))


def test_the_muon_getter_builds_muon_and_refuses_adam() -> None:
    config = megatron.OptimizerConfig(optimizer="muon", lr=0.1)
    plain = megatron.get_megatron_muon_optimizer(config, [make_model()])
    layer_wise = megatron.get_megatron_muon_optimizer(config, [make_model()], layer_wise_distributed_optimizer=True)
    assert not isinstance(plain, megatron.LayerWiseDistributedOptimizer)
    assert isinstance(layer_wise, megatron.LayerWiseDistributedOptimizer)
    assert not config.use_layer_wise_distributed_optimizer
    with pytest.raises(opt_stack.ConfigError, match="optimizer='adam': get_megatron_muon_optimizer builds rules of"):
        megatron.get_megatron_muon_optimizer(megatron.OptimizerConfig(lr=0.1), [make_model()])


# The public classes and functions of megatron.core.optimizer and megatron.core.distributed, version 0.19.2.
PUBLIC = """
    AdamOptimizerConfig ChainedOptimizer ConstantGradScaler DistributedDataParallel DistributedDataParallelConfig
    DistributedOptimizer DynamicGradScaler FP32Optimizer Float16OptimizerWithFloat16Params FullyShardedDataParallel
    HybridDeviceOptimizer LayerWiseDistributedOptimizer MegatronOptimizer OptimizerConfig ParamGroupOverride ParamKey
    ParamPredicate ParamWithNamePredicate ProcessGroupCollection SGDOptimizerConfig TorchFullyShardedDataParallel
    TorchFullyShardedDataParallelConfig check_config_overrides_consistency combine_param_group_overrides
    finalize_model_grads get_megatron_muon_optimizer get_megatron_optimizer get_mup_config_overrides
    get_standard_config_overrides param_group_identifier_keys param_group_override_to_tuple
"""


@pytest.mark.parametrize("name", PUBLIC.split())
def test_a_public_name_of_megatron_core_exists_or_says_what_to_write(name: str) -> None:
    assert not hasattr(megatron, f"{name}s")
    if name in megatron.__all__:
        assert getattr(megatron, name) is not None
    else:
        with pytest.raises(ImportError, match=f"opt_stack.megatron has no {name}; "):
            getattr(megatron, name)


MODULES = {  # of megatron.core.optimizer, optimizer_param_scheduler and distributed, with their public names
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


@pytest.mark.parametrize("name", MODULES)
def test_the_references_modules_have_their_names(name: str) -> None:
    module = import_module(f"opt_stack.megatron.{name}")
    for public in MODULES[name].split():
        if public in megatron.__all__:
            assert getattr(module, public) is getattr(megatron, public)
        else:
            with pytest.raises(ImportError, match=f"opt_stack.megatron has no {public}; "):
                getattr(module, public)


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
    ddp = megatron.DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = megatron.DistributedDataParallel(ddp, make_model(), optimizer_config=config)
    buffers = megatron.get_megatron_optimizer(config, [wrapped]).plan.buffers
    assert any("whole parameters" in buffer.name for buffer in buffers)
    groups = megatron._get_param_groups([make_model()], config, None)
    assert [group["optimizer"] for group in groups] == [group["optimizer"] for group in optimizer.param_groups]
    with pytest.raises(opt_stack.ConfigError):
        opt_stack.get_optimizer(config, [make_model()])  # without Megatron-Core's meaning


def test_other_sharded_rules_keep_their_meaning() -> None:
    config = megatron.OptimizerConfig(lr=0.1, use_distributed_optimizer=True)
    assert isinstance(megatron.get_megatron_optimizer(config, [make_model()]), megatron.DistributedOptimizer)
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
    with pytest.raises(RuntimeError):
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


@pytest.mark.parametrize("fields", [{}, {"bf16": True}, {"optimizer": "muon"}], ids=str)
def test_the_step_reads_the_reduced_gradients(fields: dict[str, Any]) -> None:
    config = OptimizerConfig(lr=0.1, clip_grad=0.25, **fields)
    model, plain = make_model(config.precision.params), make_model(config.precision.params)
    chunk = DistributedDataParallel(model)
    optimizer, expected = get_optimizer(config, [chunk]), get_optimizer(config, [plain])
    for step in range(3):
        chunk.zero_grad_buffer()
        backward(chunk, step)
        expected.zero_grad()
        backward(plain, step)
        assert optimizer.step() == expected.step()
    assert all(torch.equal(weights(model)[name], weight) for name, weight in weights(plain).items())
    assert not torch.equal(model[0].weight, make_model(config.precision.params)[0].weight)  # type: ignore[index]


def test_a_parameter_without_its_gradient_is_refused() -> None:
    chunk = DistributedDataParallel(make_model())
    optimizer = get_optimizer(OptimizerConfig(lr=0.1), [chunk])
    del chunk.module[0].weight.main_grad  # type: ignore[index]
    before = weights(chunk)
    with pytest.raises(GradientError, match=r"main_grad of 0\.weight is None; the wrapper of this"):
        optimizer.step()
    assert all(torch.equal(weights(chunk)[name], weight) for name, weight in before.items())


def sharding(chunk: Any) -> list[nn.Module]:
    chunk.ddp_config.use_distributed_optimizer = True
    return [chunk]


IN_ANOTHER_CLASS = "is a Sequential; wrap all chunks in the same class"
REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "flat shards": ({"use_distributed_optimizer": True}, lambda chunk: [chunk], "set both to False"),
    "whole matrices": (
        {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True}, lambda chunk: [chunk], "set both to False",
    ),
    "a graph": ({"optimizer_cuda_graph": True}, lambda chunk: [chunk], "optimizer_cuda_graph=True: model chunk 0"),
    "the module inside": ({}, lambda chunk: [chunk.module], "pass the DistributedDataParallel around it"),
    "a wrapper that shards": ({}, sharding, "leaves each rank a shard of the gradients in its own layout; wrap"),
    "plain after": ({}, lambda chunk: [chunk, make_model()], f"and model chunk 1 {IN_ANOTHER_CLASS}"),
    "plain before": ({}, lambda chunk: [make_model(), chunk], f"and model chunk 0 {IN_ANOTHER_CLASS}"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "chunks_of", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_wrapper_does_not_support_is_refused(fields: Any, chunks_of: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_optimizer(OptimizerConfig(lr=0.1, **fields), chunks_of(DistributedDataParallel(make_model())))
