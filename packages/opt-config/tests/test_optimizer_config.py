"""OptimizerConfig: every field and default of Megatron-Core, and every refusal with its message."""

import dataclasses
import math
import pickle

import pytest
import torch

from opt_config import AdamOptimizerConfig, ConfigError, OptimizerConfig, SGDOptimizerConfig

# Megatron-Core 0.19.2, in its order, with the later default of muon_tp_mode; muon_use_syrk is newer.
SPEC: dict[str, object] = {
    "lr": None,
    "min_lr": None,
    "decoupled_lr": None,
    "decoupled_min_lr": None,
    "weight_decay": 0.01,
    "apply_wd_to_qk_layernorm": False,
    "fp8_recipe": None,
    "fp16": False,
    "bf16": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "params_dtype": torch.float32,
    "use_precision_aware_optimizer": False,
    "store_param_remainders": True,
    "main_grads_dtype": torch.float32,
    "main_params_dtype": torch.float32,
    "exp_avg_dtype": torch.float32,
    "exp_avg_sq_dtype": torch.float32,
    "optimizer": "adam",
    "loss_scale": None,
    "initial_loss_scale": 2**32,
    "min_loss_scale": 1.0,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-08,
    "decoupled_weight_decay": True,
    "sgd_momentum": 0.9,
    "muon_momentum": 0.95,
    "muon_split_qkv": True,
    "muon_nesterov": False,
    "muon_scale_mode": "spectral",
    "muon_fp32_matmul_prec": "medium",
    "muon_coefficient_type": "quintic",
    "muon_num_ns_steps": 5,
    "muon_tp_mode": "duplicated",
    "muon_extra_scale_factor": 1.0,
    "muon_scalar_optimizer": "adam",
    "lion_beta1": 0.95,
    "lion_beta2": 0.98,
    "soap_shampoo_beta": 0.95,
    "soap_precondition_frequency": 1,
    "soap_use_kl_shampoo": True,
    "adaptive_muon_moment2_method": "adamuon",
    "adaptive_muon_beta2": 0.95,
    "adaptive_muon_eps": 1e-08,
    "use_distributed_optimizer": False,
    "use_layer_wise_distributed_optimizer": False,
    "overlap_param_gather": False,
    "overlap_param_gather_with_optimizer_step": False,
    "optimizer_cpu_offload": False,
    "optimizer_offload_fraction": 0.0,
    "use_torch_optimizer_for_cpu_offload": False,
    "overlap_cpu_optimizer_d2h_h2d": False,
    "pin_cpu_grads": True,
    "pin_cpu_params": True,
    "clip_grad": 1.0,
    "grad_norm_skip_threshold": math.inf,
    "log_num_zeros_in_grad": False,
    "barrier_with_L1_time": False,
    "timers": None,
    "config_logger_dir": "",
    "optimizer_cuda_graph": False,
    "muon_use_syrk": False,
}
OURS: dict[str, object] = {
    "soap_order": "paper",
    "soap_max_precond_dim": 10000,
    "soap_one_sided": False,
    "soap_split_qkv": False,
    "optimizer_options": None,
    "muon_weight_decay_method": "decoupled",
    "adaptive_muon_lines": "rows",
}

# what was given -> the whole message
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "both 16-bit formats": (
        {"fp16": True, "bf16": True},
        "OptimizerConfig: fp16=True: excludes bf16=True; set only one of them",
    ),
    "a beta of one": ({"adam_beta1": 1.0}, "OptimizerConfig: adam_beta1=1.0: must be in [0, 1)"),
    "a negative beta": ({"lion_beta2": -0.1}, "OptimizerConfig: lion_beta2=-0.1: must be in [0, 1)"),
    "eps of zero": ({"adam_eps": 0.0}, "OptimizerConfig: adam_eps=0.0: must be greater than 0 and finite"),
    "a negative lr": ({"lr": -1e-3}, "OptimizerConfig: lr=-0.001: must be at least 0 and finite"),
    "an infinite lr": ({"lr": math.inf}, "OptimizerConfig: lr=inf: must be at least 0 and finite"),
    "NaN": ({"weight_decay": math.nan}, "OptimizerConfig: weight_decay=nan: must be a number"),
    "a string for a number": ({"lr": "1e-4"}, "OptimizerConfig: lr='1e-4': must be a number or None"),
    "a number for a bool": ({"bf16": 1}, "OptimizerConfig: bf16=1: must be True or False"),
    "a bool for a number": ({"clip_grad": True}, "OptimizerConfig: clip_grad=True: must be a number"),
    "a bool for a count": ({"hysteresis": True}, "OptimizerConfig: hysteresis=True: must be an int"),
    "a float for a count": ({"hysteresis": 2.0}, "OptimizerConfig: hysteresis=2.0: must be an int"),
    "a string for a dtype": (
        {"params_dtype": "bfloat16"},
        "OptimizerConfig: params_dtype='bfloat16': must be a torch.dtype; from_dict and load_config read dtypes from "
        "strings",
    ),
    "a misspelt choice": (
        {"muon_scale_mode": "spectrl"},
        "OptimizerConfig: muon_scale_mode='spectrl': must be one of spectral, unit_rms_norm, shape_scaling, "
        "match_rms_adamw, mup. "
        "Did you mean spectral?",
    ),
    "a choice that is nowhere near": (
        {"muon_tp_mode": "row"},
        "OptimizerConfig: muon_tp_mode='row': must be one of blockwise, duplicated, distributed.",
    ),
    "a dtype that no moment has": (
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.int64},
        "OptimizerConfig: exp_avg_dtype=torch.int64: must be one of torch.float32, torch.float16, torch.bfloat16, "
        "torch.uint8.",
    ),
    "narrow moments without the switch": (
        {"exp_avg_dtype": torch.bfloat16},
        "OptimizerConfig: exp_avg_dtype=torch.bfloat16: has no effect without use_precision_aware_optimizer; set that "
        "too, or leave this at torch.float32",
    ),
    "bf16 gradients of fp32 parameters": (
        {"use_precision_aware_optimizer": True, "main_grads_dtype": torch.bfloat16},
        "OptimizerConfig: main_grads_dtype=torch.bfloat16: is allowed for bf16 parameters only; set bf16=True, "
        "or leave it out",
    ),
    "a second moment that is not ours": (
        {"adaptive_muon_moment2_method": "nemo"},
        "OptimizerConfig: adaptive_muon_moment2_method='nemo': must be one of adamuon, adamuon_paper, normuon, namo. "
        "Did you mean namo?",
    ),
    "a floor above the peak": (
        {"lr": 1e-4, "min_lr": 1e-3},
        "OptimizerConfig: min_lr=0.001: must not be above lr=0.0001",
    ),
    "a decoupled floor above its peak": (
        {"decoupled_lr": 1e-4, "decoupled_min_lr": 1e-3},
        "OptimizerConfig: decoupled_min_lr=0.001: must not be above decoupled_lr=0.0001",
    ),
    "a decoupled peak below the common floor": (
        {"lr": 1e-2, "min_lr": 1e-3, "decoupled_lr": 1e-4},
        "OptimizerConfig: decoupled_lr=0.0001: must not be below min_lr=0.001, to which the schedule would raise "
        "it; set decoupled_min_lr",
    ),
    "a decoupled floor without a peak": (
        {"decoupled_min_lr": 1e-5},
        "OptimizerConfig: decoupled_min_lr=1e-05: has no effect without decoupled_lr; set that too, or leave this "
        "at None",
    ),
    "two shardings": (
        {"use_distributed_optimizer": True, "use_layer_wise_distributed_optimizer": True},
        "OptimizerConfig: use_distributed_optimizer=True: excludes use_layer_wise_distributed_optimizer, which "
        "also shards the state; set only one of them",
    ),
    "overlap of nothing": (
        {"overlap_param_gather": True},
        "OptimizerConfig: overlap_param_gather=True: needs sharded state; set use_distributed_optimizer or "
        "use_layer_wise_distributed_optimizer",
    ),
    "overlap with the step alone": (
        {"use_distributed_optimizer": True, "overlap_param_gather_with_optimizer_step": True},
        "OptimizerConfig: overlap_param_gather_with_optimizer_step=True: has no effect without overlap_param_gather; "
        "set that too, or leave this at False",
    ),
    "overlap with the step of whole matrices": (
        {
            "use_layer_wise_distributed_optimizer": True,
            "overlap_param_gather": True,
            "overlap_param_gather_with_optimizer_step": True,
        },
        "OptimizerConfig: overlap_param_gather_with_optimizer_step=True: needs use_distributed_optimizer; layer-wise "
        "sharding already gathers bucket by bucket",
    ),
    "a dtype against its flag": (
        {"bf16": True, "params_dtype": torch.float16},
        "OptimizerConfig: params_dtype=torch.float16: contradicts bf16=True; leave it out or set torch.bfloat16",
    ),
    "fp16 without loss scaling": (
        {"params_dtype": torch.float16},
        "OptimizerConfig: params_dtype=torch.float16: needs loss scaling; set fp16=True",
    ),
    "a dynamic loss scale in bf16": (
        {"bf16": True, "hysteresis": 4},
        "OptimizerConfig: hysteresis=4: has no effect: the loss scale is dynamic only with fp16=True; set that, or "
        "leave it at 2",
    ),
    "adamw without decoupled decay": (
        {"optimizer": "adamw", "decoupled_weight_decay": False},
        "OptimizerConfig: decoupled_weight_decay=False: contradicts optimizer='adamw', which decouples it; set "
        "optimizer='adam' to add it to the gradient",
    ),
    "a scale that cannot back off": (
        {"initial_loss_scale": 1.0, "min_loss_scale": 2.0},
        "OptimizerConfig: min_loss_scale=2.0: must not be above initial_loss_scale=1.0",
    ),
    "a name that is none": (
        {"optimizer": ""},
        "OptimizerConfig: optimizer='': must be the name of a rule, such as adam, sgd or muon",
    ),
    "an optimizer that is not a name": (
        {"optimizer": torch.optim.Adam},
        f"OptimizerConfig: optimizer={torch.optim.Adam!r}: must be a string",
    ),
    "timers that cannot be called": ({"timers": "on"}, "OptimizerConfig: timers='on': must be a callable or None"),
    "no Newton-Schulz step": (
        {"muon_num_ns_steps": 0},
        "OptimizerConfig: muon_num_ns_steps=0: must be at least 1 and finite",
    ),
}


def test_fields_order_and_defaults_are_megatron_cores():
    """With our own fields after all of them."""
    assert {field.name: field.default for field in dataclasses.fields(OptimizerConfig)} == SPEC | OURS
    assert [field.name for field in dataclasses.fields(OptimizerConfig)] == [*SPEC, *OURS]


def test_fields_may_be_given_by_position():
    config = OptimizerConfig(1e-3, 1e-4, 2e-3, 2e-4, 0.1)
    assert (config.lr, config.min_lr, config.decoupled_lr, config.decoupled_min_lr) == (1e-3, 1e-4, 2e-3, 2e-4)
    assert config.weight_decay == 0.1


def test_adamw_is_adam_with_decoupled_decay():
    assert OptimizerConfig(optimizer="adamw") == OptimizerConfig(optimizer="adam")
    assert OptimizerConfig.from_dict({"optimizer": "adamw"}).optimizer == "adam"


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_a_bad_configuration_is_refused_with_its_message(given, message):
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(**given)
    assert str(caught.value) == message


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(lr="high", clip_grad=-1.0, muon_coefficient_type="quintik", fp16=None)
    assert str(caught.value).splitlines() == [
        "OptimizerConfig: 4 problems",
        "  lr='high': must be a number or None",
        "  fp16=None: must be True or False",
        "  clip_grad=-1.0: must be at least 0 and finite",
        "  muon_coefficient_type='quintik': must be one of simple, quintic, polar_express, cans, deepseekv4, cubic5, "
        "aol. Did you mean quintic?",
    ]
    assert [problem.field for problem in caught.value.problems] == ["lr", "fp16", "clip_grad", "muon_coefficient_type"]


@pytest.mark.parametrize(
    "given",
    [
        {"lr": 0.0, "min_lr": 0.0},
        {"lr": 1},
        {"adam_beta1": 0.0},
        {"clip_grad": 0.0},
        {"min_lr": 1e-5},
        {"lr": 1e-3, "min_lr": 1e-3},
        {"grad_norm_skip_threshold": 10.0},
        {"loss_scale": 1024.0},
        {"bf16": True, "params_dtype": torch.bfloat16},
        {"params_dtype": torch.bfloat16},
        {"store_param_remainders": False},
        {"optimizer": "torch.optim.RMSprop"},
        {"optimizer": "my_rule-2"},
    ],
    ids=str,
)
def test_a_legal_configuration_is_accepted_as_given(given):
    config = OptimizerConfig(**given)
    assert {name: getattr(config, name) for name in given} == given


def test_validate_sees_later_assignments():
    config = OptimizerConfig(lr=1e-3)
    config.timers = lambda name, log_level: None
    config.validate()
    config.min_lr = 1.0
    with pytest.raises(ConfigError, match=r"min_lr=1\.0: must not be above lr=0\.001"):
        config.validate()


def test_the_old_names_preset_their_optimizer():
    assert AdamOptimizerConfig(lr=1e-3).optimizer == "adam"
    assert SGDOptimizerConfig(sgd_momentum=0.5).optimizer == "sgd"
    assert isinstance(SGDOptimizerConfig(), OptimizerConfig)
    with pytest.raises(ConfigError, match=r"^SGDOptimizerConfig: sgd_momentum=2: "):
        SGDOptimizerConfig(sgd_momentum=2)


def test_an_error_survives_the_way_to_another_process():
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(lr=-1.0)
    arrived = pickle.loads(pickle.dumps(caught.value))
    assert (str(arrived), arrived.problems) == (str(caught.value), caught.value.problems)


def test_dataclass_tools_work_and_check():
    config = dataclasses.replace(OptimizerConfig(lr=1e-3), lr=2e-3)
    assert config == OptimizerConfig(lr=2e-3)
    with pytest.raises(ConfigError):
        dataclasses.replace(config, min_lr=1.0)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("optim_bits", "set use_precision_aware_optimizer=True with exp_avg_dtype"),
        ("betas", "set adam_beta1 and adam_beta2."),
        ("fused", "steps are always fused; leave it out."),
        ("zero_stage", "set use_distributed_optimizer=True for stage 1; for stages 2 and 3, shard the model"),
        ("overlap_grad_reduce", "set it in DistributedDataParallelConfig."),
        ("lr_decay_style", "opt_scheduler.OptimizerParamScheduler takes it."),
    ],
)
def test_names_of_other_libraries_are_answered_with_ours(name, answer):
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(**{name: 1})
    assert str(caught.value).startswith(f"OptimizerConfig: {name}=1: unknown field; {answer}")
