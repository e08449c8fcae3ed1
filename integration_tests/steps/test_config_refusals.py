"""What a configuration cannot mean for the model, the rule or the wrapper at hand is refused, and never ignored."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.buffers import DistributedDataParallel
from opt_stack import get_optimizer, get_optimizer_based_on_param_groups

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
AWARE = {"use_precision_aware_optimizer": True}
OR_ADAM = "leave it at torch.float32, or use optimizer='adam'"
IN_GRADIENT = "decoupled_weight_decay=False: optimizer='{}' supports only decoupled"
REFUSED: Mapping[str, tuple[torch.dtype, Mapping[str, Any], str]] = {  # of parameters; fields; the message
    "fp16 parameters": (FP16, {}, "set fp16=True"),
    "bf16 parameters": (BF16, {}, "set bf16=True"),
    "exp_avg of a rule that keeps none": (
        FP32,
        {**AWARE, "optimizer": "sgd", "exp_avg_dtype": BF16},
        f"exp_avg_dtype=torch.bfloat16: sgd has no such state; {OR_ADAM}",
    ),
    "exp_avg_sq of lion": (
        FP32,
        {**AWARE, "optimizer": "lion", "exp_avg_sq_dtype": FP16},
        f"exp_avg_sq_dtype=torch.float16: lion has no such state; {OR_ADAM}",
    ),
    "moments of soap": (
        FP32,
        {**AWARE, "optimizer": "soap", "exp_avg_dtype": BF16},
        f"exp_avg_dtype=torch.bfloat16: optimizer='soap' keeps it in fp32; {OR_ADAM}",
    ),
    "lion's decay": (FP32, {"optimizer": "lion", "decoupled_weight_decay": False}, IN_GRADIENT.format("lion")),
    "soap's decay": (FP32, {"optimizer": "soap", "decoupled_weight_decay": False}, IN_GRADIENT.format("soap")),
}


def build(model: nn.Module, **fields: Any) -> object:
    return get_optimizer(OptimizerConfig(lr=1e-2, **fields), [model], {})


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_rule_or_the_parameters_do_not_have_is_refused(name: str) -> None:
    dtype, fields, message = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        build(nn.Linear(3, 2, bias=False).to(dtype), **fields)
    assert message in str(caught.value)


def test_bf16_gradients_of_a_wrapper_that_keeps_fp32_ones_are_refused() -> None:
    model = DistributedDataParallel(DistributedDataParallelConfig(grad_reduce_in_fp32=True), nn.Linear(3, 2).to(BF16))
    with pytest.raises(ConfigError, match="but model chunk 0 was wrapped with grad_reduce_in_fp32=True"):
        build(model, bf16=True, main_grads_dtype=BF16, **AWARE)


def test_what_was_assigned_after_the_configuration_was_built_is_checked_too() -> None:
    config, model = OptimizerConfig(lr=1e-2, muon_tp_mode="duplicated"), nn.Linear(3, 2)
    config.adam_eps = -1.0
    with pytest.raises(ConfigError, match=r"adam_eps=-1\.0: must be greater than 0"):
        get_optimizer(config, [model])
    with pytest.raises(ConfigError, match=r"adam_eps=-1\.0: must be greater than 0"):
        get_optimizer_based_on_param_groups(config, [model], [{"params": list(model.parameters())}])
    wrapping = DistributedDataParallelConfig()
    wrapping.fp8_param_gather = True
    with pytest.raises(ConfigError, match="fp8_param_gather=True: needs use_distributed_optimizer=True"):
        DistributedDataParallel(wrapping, model)
