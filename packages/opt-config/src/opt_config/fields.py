"""The table of all fields: where each is read, the test that shows its effect, whether its capability is built."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple


class FieldUse(NamedTuple):
    """What becomes of a field."""

    read_in: str  # the module that reads it
    shown_by: str = (
        ""  # the test that shows its effect, path from the repository's root::test; empty: there is none yet
    )
    built: bool = True  # False: any value but the default is refused


_CHOICES = "opt_config.optimizer_config"
_GROUPS = "opt_paramgroups.groups"
_PRESETS = "opt_paramgroups.presets"
_BUILD = "opt_stack.build"
_RULES = "opt_stack.built_in"
_CHOICE_TESTS = "packages/opt-config/tests/test_choices.py"
_PRESET_TESTS = "packages/opt-paramgroups/tests/test_presets.py"
_GROUP_TESTS = "packages/opt-paramgroups/tests/test_groups.py"


def _precision(built: bool = True) -> FieldUse:
    return FieldUse(_CHOICES, f"{_CHOICE_TESTS}::test_precision_follows_the_flags", built)


def _sharding() -> FieldUse:
    return FieldUse(_CHOICES, f"{_CHOICE_TESTS}::test_sharding_is_one_choice")


def _scaling() -> FieldUse:
    return FieldUse(_CHOICES, f"{_CHOICE_TESTS}::test_loss_scaling_follows_fp16_and_loss_scale")


def _placement(built: bool) -> FieldUse:
    return FieldUse(_CHOICES, f"{_CHOICE_TESTS}::test_placement_is_on_device_until_offload_is_asked_for", built)


OPTIMIZER_FIELDS: Mapping[str, FieldUse] = MappingProxyType(
    {
        "lr": FieldUse(_GROUPS, f"{_GROUP_TESTS}::test_a_group_starts_at_the_configured_numbers"),
        "min_lr": FieldUse(_GROUPS, f"{_GROUP_TESTS}::test_a_group_starts_at_the_configured_numbers"),
        "decoupled_lr": FieldUse(_PRESETS, f"{_PRESET_TESTS}::test_decoupled_lr_moves_embedding_and_output_only"),
        "decoupled_min_lr": FieldUse(_PRESETS, f"{_PRESET_TESTS}::test_decoupled_lr_moves_embedding_and_output_only"),
        "weight_decay": FieldUse(_GROUPS, f"{_GROUP_TESTS}::test_a_group_starts_at_the_configured_numbers"),
        "apply_wd_to_qk_layernorm": FieldUse(
            _PRESETS, f"{_PRESET_TESTS}::test_qk_layernorm_is_decayed_only_when_asked_for"
        ),
        "fp8_recipe": FieldUse(_BUILD, built=False),
        "fp16": _precision(),
        "bf16": _precision(),
        "reuse_grad_buf_for_mxfp8_param_ag": FieldUse(_BUILD, built=False),
        "params_dtype": _precision(),
        "use_precision_aware_optimizer": _precision(),
        "store_param_remainders": _precision(),
        "main_grads_dtype": _precision(),
        "main_params_dtype": _precision(),
        "exp_avg_dtype": _precision(),
        "exp_avg_sq_dtype": _precision(),
        "optimizer": FieldUse(_GROUPS, f"{_GROUP_TESTS}::test_an_override_may_name_another_optimizer"),
        "loss_scale": _scaling(),
        "initial_loss_scale": _scaling(),
        "min_loss_scale": _scaling(),
        "loss_scale_window": _scaling(),
        "hysteresis": _scaling(),
        "adam_beta1": FieldUse(_RULES),
        "adam_beta2": FieldUse(_RULES),
        "adam_eps": FieldUse(_RULES),
        "decoupled_weight_decay": FieldUse(_RULES),
        "sgd_momentum": FieldUse(_RULES),
        "muon_momentum": FieldUse(_RULES),
        "muon_split_qkv": FieldUse(_BUILD),
        "muon_nesterov": FieldUse(_RULES),
        "muon_scale_mode": FieldUse(_RULES),
        "muon_fp32_matmul_prec": FieldUse(_RULES),
        "muon_coefficient_type": FieldUse(_RULES),
        "muon_num_ns_steps": FieldUse(_RULES),
        "muon_tp_mode": FieldUse(_RULES),
        "muon_extra_scale_factor": FieldUse(_RULES),
        "muon_scalar_optimizer": FieldUse(
            _PRESETS, f"{_PRESET_TESTS}::test_what_is_no_hidden_matrix_goes_to_the_scalar_optimizer"
        ),
        "lion_beta1": FieldUse(_RULES),
        "lion_beta2": FieldUse(_RULES),
        "soap_shampoo_beta": FieldUse(_RULES),
        "soap_precondition_frequency": FieldUse(_RULES),
        "soap_use_kl_shampoo": FieldUse(_RULES),
        "adaptive_muon_moment2_method": FieldUse(_RULES),
        "adaptive_muon_beta2": FieldUse(_RULES),
        "adaptive_muon_eps": FieldUse(_RULES),
        "use_distributed_optimizer": _sharding(),
        "use_layer_wise_distributed_optimizer": _sharding(),
        "overlap_param_gather": _sharding(),
        "overlap_param_gather_with_optimizer_step": _sharding(),
        "optimizer_cpu_offload": _placement(built=False),
        "optimizer_offload_fraction": _placement(built=False),
        "use_torch_optimizer_for_cpu_offload": FieldUse(_BUILD, built=False),
        "overlap_cpu_optimizer_d2h_h2d": _placement(built=False),
        "pin_cpu_grads": _placement(built=False),
        "pin_cpu_params": _placement(built=False),
        "clip_grad": FieldUse(_BUILD),
        "log_num_zeros_in_grad": FieldUse(_BUILD),
        "barrier_with_L1_time": FieldUse(_BUILD),
        "timers": FieldUse(_BUILD),
        "config_logger_dir": FieldUse("opt_stack.factory"),
        "optimizer_cuda_graph": FieldUse(_BUILD, built=False),
        "muon_use_syrk": FieldUse(_RULES),
        "grad_norm_skip_threshold": FieldUse(_BUILD),
    }
)

_WRAPPER = "opt_distributed.buffers.data_parallel"
_GROUPING = "opt_distributed.buffers.grouping"

DATA_PARALLEL_FIELDS: Mapping[str, FieldUse] = MappingProxyType(
    {
        "grad_reduce_in_fp32": FieldUse(_GROUPING),
        "overlap_grad_reduce": FieldUse(_WRAPPER),
        "overlap_param_gather": FieldUse(_WRAPPER),
        "align_param_gather": FieldUse(_WRAPPER, built=False),
        "use_distributed_optimizer": FieldUse(_WRAPPER),
        "num_distributed_optimizer_instances": FieldUse(_WRAPPER),
        "check_for_nan_in_grad": FieldUse(_WRAPPER),
        "check_for_large_grads": FieldUse(_WRAPPER, built=False),
        "bucket_size": FieldUse(_GROUPING),
        "num_buckets": FieldUse(_GROUPING),
        "pad_buckets_for_high_nccl_busbw": FieldUse(_GROUPING),
        "reduce_scatter_with_fp32_accumulation": FieldUse(_WRAPPER),
        "param_name_patterns_for_fp32_local_accumulation": FieldUse(_WRAPPER, built=False),
        "average_in_collective": FieldUse(_WRAPPER),
        "fp8_param_gather": FieldUse(_WRAPPER, built=False),
        "reuse_grad_buf_for_mxfp8_param_ag": FieldUse(_WRAPPER, built=False),
    }
)

UNBUILT: frozenset[str] = frozenset(name for name, use in OPTIMIZER_FIELDS.items() if not use.built)
UNBUILT_DATA_PARALLEL: frozenset[str] = frozenset(name for name, use in DATA_PARALLEL_FIELDS.items() if not use.built)


def fields_page() -> str:
    """The page of all fields, in markdown: this is `docs/config_fields.md`."""
    return "\n".join(
        [
            "# Every field, where it is read, and the test that shows it",
            "",
            "Written by `python -m opt_config fields`; a test keeps it current. A field that is not built yet is",
            "refused with a `ConfigError` when it is set to anything but its default.",
            *_section("OptimizerConfig", OPTIMIZER_FIELDS),
            *_section("DistributedDataParallelConfig", DATA_PARALLEL_FIELDS),
            "",
        ]
    )


def _section(title: str, uses: Mapping[str, FieldUse]) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| field | read in | shown by | built |", "|---|---|---|---|")
    for name, use in uses.items():
        test = f"`{use.shown_by.rpartition('::')[2]}`" if use.shown_by else ""
        yield f"| `{name}` | `{use.read_in}` | {test} | {'yes' if use.built else 'not yet'} |"
