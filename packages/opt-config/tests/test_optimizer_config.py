"""OptimizerConfig: every field and default of Megatron-Core, and every refusal with its message."""

import dataclasses
import math
import pickle
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from opt_config import AdamOptimizerConfig, ConfigError, OptimizerConfig, SGDOptimizerConfig

# Megatron-Core 0.19.2, in its order; muon_use_syrk is newer.
SPEC = {
    "lr": None, "min_lr": None, "decoupled_lr": None, "decoupled_min_lr": None, "weight_decay": 0.01,
    "apply_wd_to_qk_layernorm": False, "fp8_recipe": None, "fp16": False, "bf16": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False, "params_dtype": torch.float32,
    "use_precision_aware_optimizer": False, "store_param_remainders": True, "main_grads_dtype": torch.float32,
    "main_params_dtype": torch.float32, "exp_avg_dtype": torch.float32, "exp_avg_sq_dtype": torch.float32,
    "optimizer": "adam", "loss_scale": None, "initial_loss_scale": 2**32, "min_loss_scale": 1.0,
    "loss_scale_window": 1000, "hysteresis": 2, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-08,
    "decoupled_weight_decay": True, "sgd_momentum": 0.9, "muon_momentum": 0.95, "muon_split_qkv": True,
    "muon_nesterov": False, "muon_scale_mode": "spectral", "muon_fp32_matmul_prec": "medium",
    "muon_coefficient_type": "quintic", "muon_num_ns_steps": 5, "muon_tp_mode": "blockwise",
    "muon_extra_scale_factor": 1.0, "muon_scalar_optimizer": "adam", "lion_beta1": 0.95, "lion_beta2": 0.98,
    "soap_shampoo_beta": 0.95, "soap_precondition_frequency": 1, "soap_use_kl_shampoo": True,
    "adaptive_muon_moment2_method": "adamuon", "adaptive_muon_beta2": 0.95, "adaptive_muon_eps": 1e-08,
    "use_distributed_optimizer": False, "use_layer_wise_distributed_optimizer": False, "overlap_param_gather": False,
    "overlap_param_gather_with_optimizer_step": False, "optimizer_cpu_offload": False,
    "optimizer_offload_fraction": 0.0, "use_torch_optimizer_for_cpu_offload": False,
    "overlap_cpu_optimizer_d2h_h2d": False, "pin_cpu_grads": True, "pin_cpu_params": True, "clip_grad": 1.0,
    "grad_norm_skip_threshold": math.inf, "log_num_zeros_in_grad": False, "barrier_with_L1_time": False,
    "timers": None, "config_logger_dir": "", "optimizer_cuda_graph": False, "muon_use_syrk": False,
}  # fmt: skip
OURS = {
    "soap_order": "paper",
    "soap_max_precond_dim": 10000,
    "soap_one_sided": False,
    "soap_split_qkv": False,
    "optimizer_options": None,
    "muon_weight_decay_method": "decoupled",
    "adaptive_muon_lines": "rows",
    "muon_pre_norm": "none",
    "muon_post_norm": "none",
    "muon_nuclear_scale": False,
    "optimizer_offload_compute": "host",
    "skip_sigma": math.inf,
    "skip_window": 128,
    "ema_decay": None,
    "ema_from_step": 1,
    "ema_share": 1.0,
    "ema_nesterov_beta": None,
    "ema_nesterov_gamma": 0.99,
}

ON_HOST = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
WHOLE = {"use_layer_wise_distributed_optimizer": True}
FLAT = {"use_distributed_optimizer": True}
WITH_STEP = {"overlap_param_gather_with_optimizer_step": True}
# what was given, and how the message begins after "OptimizerConfig: "
AWARE = {"use_precision_aware_optimizer": True}
BF16_AWARE = {"bf16": True, **AWARE}
FP16_MAINS, SHORT_MAINS = ({"main_params_dtype": dtype} for dtype in (torch.float16, torch.int8))
REFUSED = [
    ({"fp16": True, "bf16": True}, "fp16=True: excludes bf16=True; set only one of them"),
    ({"adam_beta1": 1.0}, "adam_beta1=1.0: must be in [0, 1)"),
    ({"ema_decay": 1.0}, "ema_decay=1.0: must be in [0, 1)"),
    ({"ema_decay": -0.1}, "ema_decay=-0.1: must be in [0, 1)"),
    ({"ema_decay": {"half_life": 0.1}}, "ema_decay={'half_life': 0.1}: must have half_life, a fraction of the trai"),
    ({"ema_decay": {"half_life": 2.0, "num_steps": 9}}, "ema_decay={'half_life': 2.0, 'num_steps': 9}: half_life must"),
    (
        {"ema_decay": {"num_steps": 9}},
        "ema_decay={'num_steps': 9}: must have half_life, a fraction of the training, and",
    ),
    ({"ema_share": 0.5}, "ema_share=0.5: has no effect without ema_decay; set that too"),
    ({"ema_decay": 0.9, "ema_share": 0.0}, "ema_share=0.0: must be in (0, 1]"),
    ({"ema_decay": 0.9, "ema_from_step": 0}, "ema_from_step=0: must be at least 1 and finite"),
    ({"ema_from_step": 5}, "ema_from_step=5: has no effect without ema_decay"),
    ({"ema_nesterov_beta": 1.0}, "ema_nesterov_beta=1.0: must be in [0, 1)"),
    ({"ema_nesterov_gamma": 0.5}, "ema_nesterov_gamma=0.5: has no effect without ema_nesterov_beta"),
    (
        {"ema_decay": 0.9, "optimizer": "schedule_free"},
        "ema_decay=0.9: excludes optimizer='schedule_free', which keeps an average of its own",
    ),
    ({"lion_beta2": -0.1}, "lion_beta2=-0.1: must be in [0, 1)"),
    ({"adam_eps": 0.0}, "adam_eps=0.0: must be greater than 0 and finite"),
    ({"lr": -1e-3}, "lr=-0.001: must be at least 0 and finite"),
    ({"lr": math.inf}, "lr=inf: must be at least 0 and finite"),
    ({"weight_decay": -0.1}, "weight_decay=-0.1: must be at least 0 and finite"),
    ({"skip_sigma": 0.0}, "skip_sigma=0.0: must be greater than 0"),
    ({"skip_sigma": 6.0, "skip_window": 1}, "skip_window=1: must be at least 2 and finite"),
    ({"skip_window": 64}, "skip_window=64: has no effect without skip_sigma; set that too"),
    ({"hysteresis": 0}, "hysteresis=0: must be at least 1 and finite"),
    ({"adam_beta2": -0.1}, "adam_beta2=-0.1: must be in [0, 1)"),
    ({"weight_decay": math.nan}, "weight_decay=nan: must be a number"),
    ({"lr": 10**400}, "lr=an int of hundreds of digits: must be at least 0 and finite"),
    (
        {"hysteresis": 10**400, "fp16": True},
        "hysteresis=an int of hundreds of digits: must be an integer of at most 64 bits",
    ),
    ({"loss_scale": -(10**400)}, "loss_scale=an int of hundreds of digits: must be greater than 0 and finite"),
    ({"lr": "1e-4"}, "lr='1e-4': must be a number or None"),
    ({"bf16": 1}, "bf16=1: must be True or False"),
    ({"clip_grad": True}, "clip_grad=True: must be a number"),
    ({"hysteresis": True}, "hysteresis=True: must be an int"),
    ({"hysteresis": 2.0}, "hysteresis=2.0: must be an int"),
    ({"params_dtype": "bfloat16"}, "params_dtype='bfloat16': must be a torch.dtype; from_dict and load_config read"),
    ({"exp_avg_dtype": "int8"}, "exp_avg_dtype='int8': must be a torch.dtype; for int8 codes with a scale per block"),
    ({"muon_scale_mode": "spectrl"}, "muon_scale_mode='spectrl': must be one of spectral, unit_rms_norm, shape_scal"),
    ({"muon_tp_mode": "row"}, "muon_tp_mode='row': must be one of blockwise, duplicated, layer_sharded, distributed."),
    (AWARE | {"exp_avg_dtype": torch.int64}, "exp_avg_dtype=torch.int64: must be one of torch.float32, torch.float16"),
    ({"exp_avg_dtype": torch.bfloat16}, "exp_avg_dtype=torch.bfloat16: has no effect without use_precision_aware_opti"),
    (AWARE | {"main_grads_dtype": torch.bfloat16}, "main_grads_dtype=torch.bfloat16: is allowed for bf16 parameters"),
    ({"adaptive_muon_moment2_method": "nemo"}, "adaptive_muon_moment2_method='nemo': must be one of adamuon, adamuon_"),
    ({"lr": 1e-4, "min_lr": 1e-3}, "min_lr=0.001: must not be above lr=0.0001"),
    ({"decoupled_lr": 1e-4, "decoupled_min_lr": 1e-3}, "decoupled_min_lr=0.001: must not be above decoupled_lr=0.0001"),
    ({"lr": 1e-2, "min_lr": 1e-3, "decoupled_lr": 1e-4}, "decoupled_lr=0.0001: must not be below min_lr=0.001, to wh"),
    ({"decoupled_min_lr": 1e-5}, "decoupled_min_lr=1e-05: has no effect without decoupled_lr; set that too, or leave"),
    (FLAT | WHOLE, "use_distributed_optimizer=True: excludes use_layer_wise_distributed_optimizer, which also shards"),
    ({"overlap_param_gather": True}, "overlap_param_gather=True: needs sharded state; set use_distributed_optimizer o"),
    (FLAT | WITH_STEP, "overlap_param_gather_with_optimizer_step=True: has no effect without overlap_param_gather; se"),
    (WHOLE | WITH_STEP | {"overlap_param_gather": True}, "overlap_param_gather_with_optimizer_step=True: needs use_di"),
    ({"bf16": True, "params_dtype": torch.float16}, "params_dtype=torch.float16: contradicts bf16=True; leave it out"),
    ({"params_dtype": torch.float16}, "params_dtype=torch.float16: needs loss scaling; set fp16=True"),
    (
        {"bf16": True, "hysteresis": 4},
        "hysteresis=4: has no effect without fp16; set that too, or leave this at its de",
    ),
    ({"optimizer": "AdamW", "decoupled_weight_decay": False}, "decoupled_weight_decay=False: contradicts optimizer='a"),
    (
        {"fp16": True, "initial_loss_scale": 1.0, "min_loss_scale": 2.0},
        "min_loss_scale=2.0: must not be above initial_loss_scale=1",
    ),
    ({"optimizer": ""}, "optimizer='': must be the name of a rule, such as adam, sgd or muon"),
    ({"optimizer": torch.optim.Adam}, f"optimizer={torch.optim.Adam!r}: must be a string"),
    ({"timers": "on"}, "timers='on': must be a callable or None"),
    ({"muon_num_ns_steps": 0}, "muon_num_ns_steps=0: must be at least 1 and finite"),
    (
        {"optimizer_offload_compute": "device"},
        "optimizer_offload_compute='device': has no effect without optimizer_cpu",
    ),
    ({**ON_HOST, "optimizer_offload_compute": "gpu"}, "optimizer_offload_compute='gpu': must be one of"),
    (
        {**ON_HOST, "optimizer_offload_compute": "device", "use_torch_optimizer_for_cpu_offload": True},
        "optimizer_offload_compute='device': excludes use_torch_optimizer_for_cpu_offload, which updates on the host",
    ),
    (
        {**ON_HOST, "optimizer_offload_compute": "device", "ema_decay": 0.9},
        "ema_decay=0.9: excludes optimizer_offload_compute='device', as the host computes averages",
    ),
    ({"pin_cpu_params": False}, "pin_cpu_params=False: has no effect without optimizer_cpu_offload; set that too, or"),
    ({"optimizer_cpu_offload": True}, "optimizer_offload_fraction=0.0: offloads nothing; set it in (0, 1], or set"),
    # Names of other libraries are answered with ours.
    ({"optim_bits": 8}, "optim_bits=8: unknown field; set use_precision_aware_optimizer=True with exp_avg_dtype"),
    ({"betas": (0.9, 0.95)}, "betas=(0.9, 0.95): unknown field; set adam_beta1 and adam_beta2."),
    ({"bf16_stochastic_round": True}, "bf16_stochastic_round=True: unknown field; leave it out: main values are kept"),
    ({"fused": True}, "fused=True: unknown field; steps are always fused; leave it out."),
    ({"zero_stage": 1}, "zero_stage=1: unknown field; set use_distributed_optimizer=True for stage 1; for stages 2 an"),
    ({"overlap_grad_reduce": True}, "overlap_grad_reduce=True: unknown field; set it in DistributedDataParallelConfig"),
    ({"lr_decay_style": "cosine"}, "lr_decay_style='cosine': unknown field; opt_scheduler.OptimizerParamScheduler tak"),
    ({"fp8_recipe": "nvfp4"}, "fp8_recipe='nvfp4': 4-bit parameters are not supported; use 'mxfp8'"),
    ({"fp8_recipe": "mxfp4"}, "fp8_recipe='mxfp4': must be one of delayed, tensorwise, blockwise, mxfp8"),
    (BF16_AWARE | {"fp8_recipe": "mxfp8"} | FP16_MAINS, "main_params_dtype=torch.float16: excludes fp8_recipe: mains"),
    (BF16_AWARE | {"fp8_recipe": "delayed"} | SHORT_MAINS, "main_params_dtype=torch.int8: excludes fp8_recipe"),
    (BF16_AWARE | SHORT_MAINS | {"store_param_remainders": False}, "main_params_dtype=torch.int8: is an 8-bit remaind"),
    (AWARE | FP16_MAINS, "main_params_dtype=torch.float16: is allowed for 16-bit parameters only"),
    (AWARE | SHORT_MAINS, "main_params_dtype=torch.int8: is an 8-bit remainder of bf16 parameters; set bf16=True"),
    (AWARE | SHORT_MAINS | {"fp16": True}, "main_params_dtype=torch.int8: is an 8-bit remainder of bf16 parameters"),
    (AWARE, "use_precision_aware_optimizer=True: has no effect: nothing of torch.float32 parameters is narrower; set"),
    (
        AWARE | {"fp16": True},
        "use_precision_aware_optimizer=True: has no effect: nothing of torch.float16 parameters i",
    ),
    ({"store_param_remainders": False}, "store_param_remainders=False: has no effect without use_precision_aware_opt"),
    (AWARE | FP16_MAINS | {"fp16": True, "store_param_remainders": False}, "store_param_remainders=False: has no ef"),
    ({"bf16": True} | SHORT_MAINS, "main_params_dtype=torch.int8: has no effect without use_precision_aware_optimizer"),
]


def test_fields_order_and_defaults_are_megatron_cores():
    """With our own fields after all of them."""
    names = [field.name for field in dataclasses.fields(OptimizerConfig)]
    assert names == [*SPEC, *OURS], "put a new field of ours last, for callers by position, and add it to OURS here"
    assert {field.name: field.default for field in dataclasses.fields(OptimizerConfig)} == SPEC | OURS


def test_adamw_is_adam_with_decoupled_decay():
    assert OptimizerConfig(optimizer="adamw") == OptimizerConfig(optimizer="AdamW") == OptimizerConfig(optimizer="adam")
    assert OptimizerConfig.from_dict({"optimizer": "adamw"}).optimizer == "adam"


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_a_bad_configuration_is_refused_with_its_message(given, message):
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(**given)
    assert str(caught.value).startswith(f"OptimizerConfig: {message}")


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(lr="high", clip_grad=-1.0, muon_coefficient_type="quintik", fp16=None)
    assert str(caught.value).startswith(
        "OptimizerConfig: 4 problems\n  lr='high': must be a number or None\n  fp16=None: "
    )
    assert str(caught.value).endswith("Did you mean quintic?")
    assert [problem.field for problem in caught.value.problems] == ["lr", "fp16", "clip_grad", "muon_coefficient_type"]
    arrived = pickle.loads(pickle.dumps(caught.value))  # as from another process
    assert (str(arrived), arrived.problems) == (str(caught.value), caught.value.problems)


LEGAL = [
    {"lr": 0.0, "min_lr": 0.0}, {"lr": 1}, {"adam_beta1": 0.0}, {"clip_grad": 0.0}, {"min_lr": 1e-5},
    {"lr": 1e-3, "min_lr": 1e-3}, {"grad_norm_skip_threshold": 10.0}, {"loss_scale": 1024.0},
    {"bf16": True, "params_dtype": torch.bfloat16}, {"params_dtype": torch.bfloat16},
    BF16_AWARE | {"store_param_remainders": False}, {"barrier_with_L1_time": True},
    {"optimizer": "torch.optim.RMSprop"}, {"optimizer": "my_rule-2"},
]  # fmt: skip


def test_a_legal_configuration_is_accepted_as_given():
    for given in LEGAL:
        config = OptimizerConfig(**given)
        assert {name: getattr(config, name) for name in given} == given


def test_later_assignments_are_validated_and_replace_checks():
    config = dataclasses.replace(OptimizerConfig(lr=1e-2), lr=1e-3)
    config.timers = lambda name, log_level: None
    config.validate()
    config.min_lr = 1.0
    for check in (config.validate, lambda: dataclasses.replace(config, clip_grad=0.5)):
        with pytest.raises(ConfigError, match=r"min_lr=1\.0: must not be above lr=0\.001"):
            check()


def test_the_old_names_preset_their_optimizer():
    assert AdamOptimizerConfig(lr=1e-3).optimizer == "adam"
    assert SGDOptimizerConfig(sgd_momentum=0.5).optimizer == "sgd"
    assert isinstance(SGDOptimizerConfig(), OptimizerConfig)
    with pytest.raises(ConfigError, match=r"^SGDOptimizerConfig: sgd_momentum=2: "):
        SGDOptimizerConfig(sgd_momentum=2)


@dataclass
class Offloaded(OptimizerConfig):
    optimizer_cpu_offload: bool = True
    kind: Literal["a", "b"] = "a"


def test_a_subclass_may_have_other_defaults_and_kinds_of_fields():
    """Its own defaults counted as settings that were left out."""
    assert Offloaded(optimizer_offload_fraction=0.5).optimizer_offload_fraction == 0.5
    with pytest.raises(ConfigError, match="has no effect without optimizer_cpu_offload"):
        Offloaded(optimizer_cpu_offload=False, optimizer_offload_fraction=0.5)


def test_numbers_of_numpy_become_plain_ones():
    lr = type("float64", (float,), {})(0.25)
    assert type(OptimizerConfig(lr=lr).lr) is float
