"""What a configuration cannot mean for the model, the rule or the wrapper at hand is refused, and never ignored."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.buffers import DistributedDataParallel
from opt_stack import get_optimizer, get_optimizer_based_on_param_groups

BF16, FP16 = torch.bfloat16, torch.float16


def build(model: nn.Module, **fields: Any) -> object:
    return get_optimizer(OptimizerConfig(lr=1e-2, **fields), [model], {})


@pytest.mark.parametrize(("dtype", "flag"), [(FP16, "fp16=True"), (BF16, "bf16=True")], ids=["fp16", "bf16"])
def test_parameters_of_a_dtype_that_no_field_allows_are_refused(dtype: torch.dtype, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"set {flag}"):
        build(nn.Linear(3, 2).to(dtype))


MOMENTS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "exp_avg of a rule that keeps none": (
        {"optimizer": "sgd", "exp_avg_dtype": BF16},
        "exp_avg_dtype=torch.bfloat16: sgd has no such state; leave it at torch.float32, or use optimizer='adam'",
    ),
    "exp_avg_sq of lion": (
        {"optimizer": "lion", "exp_avg_sq_dtype": FP16},
        "exp_avg_sq_dtype=torch.float16: lion has no such state; leave it at torch.float32, or use optimizer='adam'",
    ),
    "moments of soap": (
        {"optimizer": "soap", "exp_avg_dtype": BF16},
        "exp_avg_dtype=torch.bfloat16: optimizer='soap' keeps it in fp32; leave it at torch.float32, or use "
        "optimizer='adam'",
    ),
}


@pytest.mark.parametrize("case", MOMENTS)
def test_a_narrow_moment_that_the_rule_does_not_keep_is_refused(case: str) -> None:
    fields, message = MOMENTS[case]
    with pytest.raises(ConfigError) as caught:
        build(nn.Linear(3, 2, bias=False), use_precision_aware_optimizer=True, **fields)
    assert str(caught.value) == message


@pytest.mark.parametrize("rule", ["lion", "soap"])
def test_a_decay_in_the_gradient_is_refused_where_the_rule_has_none(rule: str) -> None:
    with pytest.raises(ConfigError, match=f"decoupled_weight_decay=False: optimizer='{rule}' supports only decoupled"):
        build(nn.Linear(3, 2, bias=False), optimizer=rule, decoupled_weight_decay=False)


def test_bf16_gradients_of_a_wrapper_that_keeps_fp32_ones_are_refused() -> None:
    model = DistributedDataParallel(DistributedDataParallelConfig(grad_reduce_in_fp32=True), nn.Linear(3, 2).to(BF16))
    with pytest.raises(ConfigError, match="but model chunk 0 was wrapped with grad_reduce_in_fp32=True"):
        build(model, bf16=True, use_precision_aware_optimizer=True, main_grads_dtype=BF16)


def test_what_was_assigned_after_the_configuration_was_built_is_checked_too() -> None:
    config, model = OptimizerConfig(lr=1e-2, muon_tp_mode="duplicated"), nn.Linear(3, 2)
    config.adam_eps = -1.0
    for build_it in (
        lambda: get_optimizer(config, [model]),
        lambda: get_optimizer_based_on_param_groups(config, [model], [{"params": list(model.parameters())}]),
    ):
        with pytest.raises(ConfigError, match=r"adam_eps=-1\.0: must be greater than 0"):
            build_it()
    wrapping = DistributedDataParallelConfig()
    wrapping.fp8_param_gather = True
    with pytest.raises(ConfigError, match="fp8_param_gather=True: needs use_distributed_optimizer=True"):
        DistributedDataParallel(wrapping, model)
