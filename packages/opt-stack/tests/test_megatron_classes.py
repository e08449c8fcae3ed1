"""opt_stack.megatron: Megatron-Core's wrapper, its classes of optimizers, and names that are refused in a sentence."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stack_models import backward, make_model, weights
from torch import nn

import opt_stack
import opt_stack.megatron as megatron
from opt_distributed.comm.collectives import Alone
from opt_distributed.comm.groups import Axes, Roles
from opt_distributed.comm.threads import ThreadComm, run_threads

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
    monkeypatch.setattr("opt_stack.megatron.wrapper.finalize", lambda *args, **options: found.update(options))
    transformer = SimpleNamespace(qk_layernorm=True, moe_router_bias_update_rate=0.5)
    chunk = megatron.DistributedDataParallel(transformer, DDP(), make_model())
    megatron.finalize_model_grads([chunk])
    assert found == {"qk_layernorm": True, "router_bias_update_rate": 0.5}
    megatron.finalize_model_grads([chunk], qk_layernorm=False)
    assert found["qk_layernorm"] is False


def test_an_all_reduce_of_shards_is_refused() -> None:
    chunk = megatron.DistributedDataParallel(SimpleNamespace(), DDP(use_distributed_optimizer=True), make_model())
    with pytest.raises(opt_stack.ConfigError, match="force_all_reduce=True: with use_distributed_optimizer=True"):
        megatron.finalize_model_grads([chunk], force_all_reduce=True)


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


def test_a_name_that_does_not_exist_here_says_what_to_write() -> None:
    with pytest.raises(ImportError, match="has no FullyShardedDataParallel; shard the model with torch's fully_shard"):
        from opt_stack.megatron import FullyShardedDataParallel  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'get_megatron_optimiser'"):
        from opt_stack.megatron import get_megatron_optimiser  # noqa: F401


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
    if name in megatron.__all__:
        assert getattr(megatron, name) is not None
    else:
        with pytest.raises(ImportError, match=f"opt_stack.megatron has no {name}; "):
            getattr(megatron, name)
