"""Megatron-Core's names: all there, under its signatures, and a script that only changed its imports runs."""

import inspect
import logging
from typing import Any

import pytest
import torch
from stack_models import backward, make_model
from torch import nn

import opt_stack.megatron as megatron

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
METHODS = {
    "OptimizerParamScheduler": ("get_wd", "get_lr", "step", "state_dict", "_check_and_set", "load_state_dict"),
    "ParamKey": ("matches",),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_positional_parameters_are_megatron_cores(name: str) -> None:
    parameters = inspect.signature(getattr(megatron, name)).parameters.values()
    message = [f"{p.name}{'=' * (p.default is not p.empty)}" for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert " ".join(message) == SIGNATURES[name]


@pytest.mark.parametrize("name", METHODS)
def test_classes_have_megatron_cores_methods(name: str) -> None:
    for method in METHODS[name]:
        assert inspect.isfunction(getattr(getattr(megatron, name), method))


def test_everything_that_is_promised_is_there() -> None:
    assert set(SIGNATURES) <= set(megatron.__all__)
    assert all(hasattr(megatron, name) for name in megatron.__all__)
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
