"""The four typed choices that follow from the flat fields."""

import dataclasses

import pytest
import torch

from opt_config import (
    ConstantScale,
    DynamicScale,
    FlatShards,
    NoScale,
    OnDevice,
    OnHost,
    OptimizerConfig,
    Precision,
    Replicated,
    WholeParams,
)

FP16 = torch.float16
BF16 = torch.bfloat16
FP32 = torch.float32
PLAIN = Precision(params=FP32, grads=FP32, mains=FP32, exp_avg=FP32, exp_avg_sq=FP32, remainder=False)

AWARE = {"use_precision_aware_optimizer": True}
PRECISIONS = {
    "fp32": ({}, {}),
    "fp16": ({"fp16": True}, {"params": FP16}),
    "bf16": ({"bf16": True}, {"params": BF16}),
    "by dtype": ({"params_dtype": BF16}, {"params": BF16}),
    "remainders by default": (AWARE | {"bf16": True}, {"params": BF16, "remainder": True}),
    "remainders off": (AWARE | {"bf16": True, "store_param_remainders": False}, {"params": BF16}),
    "no remainders of fp16 params": (AWARE | {"fp16": True, "exp_avg_dtype": BF16}, {"params": FP16, "exp_avg": BF16}),
    "no remainders of fp16 mains": (AWARE | {"bf16": True, "main_params_dtype": FP16}, {"params": BF16, "mains": FP16}),
    "narrow states": (AWARE | {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": FP16},
                      {"exp_avg": torch.uint8, "exp_avg_sq": FP16}),
    "bf16 gradients": (AWARE | {"params_dtype": BF16, "main_grads_dtype": BF16},
                       {"params": BF16, "grads": BF16, "remainder": True}),
}  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), PRECISIONS.values(), ids=PRECISIONS)
def test_precision_follows_the_flags(given, expected):
    assert OptimizerConfig(**given).precision == dataclasses.replace(PLAIN, **expected)


FLAT = {"use_distributed_optimizer": True}
WHOLE = {"use_layer_wise_distributed_optimizer": True}
OVERLAP = {"overlap_param_gather": True}
WITH_STEP = {"overlap_param_gather_with_optimizer_step": True}
FP16_NUMBERS = {
    "fp16": True,
    "initial_loss_scale": 2**16,
    "min_loss_scale": 4.0,
    "loss_scale_window": 50,
    "hysteresis": 3,
}
OFFLOAD = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.25,
    "pin_cpu_grads": False,
    "overlap_cpu_optimizer_d2h_h2d": True,
}


CHOICES = [
    ({}, "sharding", Replicated()),
    (FLAT, "sharding", FlatShards(overlap_gather=False, overlap_gather_with_step=False)),
    (FLAT | OVERLAP, "sharding", FlatShards(overlap_gather=True, overlap_gather_with_step=False)),
    (FLAT | OVERLAP | WITH_STEP, "sharding", FlatShards(overlap_gather=True, overlap_gather_with_step=True)),
    (WHOLE, "sharding", WholeParams(overlap_gather=False)),
    (WHOLE | OVERLAP, "sharding", WholeParams(overlap_gather=True)),
    ({}, "loss_scaling", NoScale()),
    ({"bf16": True}, "loss_scaling", NoScale()),
    ({"fp16": True}, "loss_scaling", DynamicScale(initial=2**32, minimum=1.0, window=1000, hysteresis=2)),
    (FP16_NUMBERS, "loss_scaling", DynamicScale(initial=2**16, minimum=4.0, window=50, hysteresis=3)),
    ({"fp16": True, "loss_scale": 128.0}, "loss_scaling", ConstantScale(scale=128.0)),
    ({"bf16": True, "loss_scale": 2.0}, "loss_scaling", ConstantScale(scale=2.0)),
    ({}, "placement", OnDevice()),
    (OFFLOAD, "placement", OnHost(fraction=0.25, overlap=True, pin_grads=False, pin_params=True)),
]


@pytest.mark.parametrize(("given", "choice", "expected"), CHOICES, ids=lambda value: str(value)[:60])
def test_each_choice_follows_from_the_fields(given, choice, expected):
    assert getattr(OptimizerConfig(**given), choice) == expected


def test_choices_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OptimizerConfig().precision.remainder = True
