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

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
PLAIN = Precision(params=FP32, grads=FP32, mains=FP32, exp_avg=FP32, exp_avg_sq=FP32, remainder=False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({}, {}, id="fp32"),
        pytest.param({"fp16": True}, {"params": FP16}, id="fp16"),
        pytest.param({"bf16": True}, {"params": BF16}, id="bf16"),
        pytest.param({"params_dtype": BF16}, {"params": BF16}, id="by dtype"),
        pytest.param(
            {"bf16": True, "use_precision_aware_optimizer": True},
            {"params": BF16, "remainder": True},
            id="remainders by default",
        ),
        pytest.param(
            {"bf16": True, "use_precision_aware_optimizer": True, "store_param_remainders": False},
            {"params": BF16},
            id="remainders off",
        ),
        pytest.param(
            {"fp16": True, "use_precision_aware_optimizer": True}, {"params": FP16}, id="no remainders of fp16 params"
        ),
        pytest.param(
            {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": FP16},
            {"exp_avg": torch.uint8, "exp_avg_sq": FP16},
            id="narrow states",
        ),
        pytest.param(
            {"params_dtype": BF16, "use_precision_aware_optimizer": True, "main_grads_dtype": BF16},
            {"params": BF16, "grads": BF16, "remainder": True},
            id="bf16 gradients",
        ),
    ],
)
def test_precision_follows_the_flags(given, expected):
    assert OptimizerConfig(**given).precision == dataclasses.replace(PLAIN, **expected)


def test_there_are_no_remainders_of_fp16_mains():
    config = OptimizerConfig(bf16=True, use_precision_aware_optimizer=True, main_params_dtype=FP16)
    assert config.precision == dataclasses.replace(PLAIN, params=BF16, mains=FP16)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({}, Replicated(), id="replicated"),
        pytest.param(
            {"use_distributed_optimizer": True},
            FlatShards(overlap_gather=False, overlap_gather_with_step=False),
            id="flat",
        ),
        pytest.param(
            {"use_distributed_optimizer": True, "overlap_param_gather": True},
            FlatShards(overlap_gather=True, overlap_gather_with_step=False),
            id="flat, overlap",
        ),
        pytest.param(
            {
                "use_distributed_optimizer": True,
                "overlap_param_gather": True,
                "overlap_param_gather_with_optimizer_step": True,
            },
            FlatShards(overlap_gather=True, overlap_gather_with_step=True),
            id="flat, overlap with the step",
        ),
        pytest.param(
            {"use_layer_wise_distributed_optimizer": True}, WholeParams(overlap_gather=False), id="whole parameters"
        ),
        pytest.param(
            {"use_layer_wise_distributed_optimizer": True, "overlap_param_gather": True},
            WholeParams(overlap_gather=True),
            id="whole parameters, overlap",
        ),
    ],
)
def test_sharding_is_one_choice(given, expected):
    assert OptimizerConfig(**given).sharding == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({}, NoScale(), id="fp32"),
        pytest.param({"bf16": True}, NoScale(), id="bf16"),
        pytest.param(
            {"fp16": True},
            DynamicScale(initial=2**32, minimum=1.0, window=1000, hysteresis=2, growth=2.0, backoff=0.5),
            id="fp16",
        ),
        pytest.param(
            {
                "fp16": True,
                "initial_loss_scale": 2**16,
                "min_loss_scale": 4.0,
                "loss_scale_window": 50,
                "hysteresis": 3,
            },
            DynamicScale(initial=2**16, minimum=4.0, window=50, hysteresis=3),
            id="fp16, its own numbers",
        ),
        pytest.param({"fp16": True, "loss_scale": 128.0}, ConstantScale(scale=128.0), id="fp16, constant"),
        pytest.param({"bf16": True, "loss_scale": 2.0}, ConstantScale(scale=2.0), id="bf16, constant"),
    ],
)
def test_loss_scaling_follows_fp16_and_loss_scale(given, expected):
    assert OptimizerConfig(**given).loss_scaling == expected


def test_placement_is_on_device_unless_offload_is_set():
    assert OptimizerConfig().placement == OnDevice()
    config = OptimizerConfig(
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=0.25,
        overlap_cpu_optimizer_d2h_h2d=True,
        pin_cpu_grads=False,
    )
    assert config.placement == OnHost(fraction=0.25, overlap=True, pin_grads=False, pin_params=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"pin_cpu_params": False},
            "OptimizerConfig: pin_cpu_params=False: has no effect without optimizer_cpu_offload; set that too, or "
            "leave this at True",
        ),
        (
            {"optimizer_cpu_offload": True},
            "OptimizerConfig: optimizer_offload_fraction=0.0: offloads nothing; set it in (0, 1], or set "
            "optimizer_cpu_offload=False",
        ),
    ],
    ids=["a pin without offload", "offload of nothing"],
)
def test_offload_options_need_offload(given, message):
    with pytest.raises(ValueError) as caught:
        OptimizerConfig(**given)
    assert str(caught.value) == message


def test_choices_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OptimizerConfig().precision.remainder = True
