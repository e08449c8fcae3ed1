"""Table of all fields: the module that reads each, and the test that shows its effect."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from opt_config.unsupported_fields import UNSUPPORTED_DATA_PARALLEL_FIELDS


class FieldUse(NamedTuple):
    """Where a field is used and tested."""

    read_in: str  # the module that reads it
    shown_by: str  # test that fails if the field has no effect: path from the repository root::name


_EFFECTS = "integration_tests/steps/test_fields_of_"
_CHOICES = "opt_config.optimizer_config"
_GROUPS = "opt_paramgroups.groups"
_PRESETS = "opt_paramgroups.presets"
_BUILD = "opt_stack.building.build"
_RULES = "opt_stack.rules.built_in"
_FP8 = "opt_stack.planning.fp8"
_FP8_TESTS = "integration_tests/fp8/test_fp8_params.py"
_REUSE_TESTS = "integration_tests/fp8/test_fp8_through_grads.py"
_PRESET_TESTS = "packages/opt-paramgroups/tests/test_presets.py"
_GROUP_TESTS = "packages/opt-paramgroups/tests/test_groups.py"
_OFFLOAD_TESTS = "integration_tests/offload/test_offload.py"
_FACADE_TESTS = "packages/opt-stack/tests/test_facade.py"


def _effect(subject: str, read_in: str, test: str) -> FieldUse:
    return FieldUse(read_in, f"{_EFFECTS}{subject}.py::{test}")


def _offload(test: str) -> FieldUse:
    return FieldUse(_CHOICES, f"{_OFFLOAD_TESTS}::{test}")


def _rule(read_in: str = _RULES) -> FieldUse:
    """A hyper-parameter or option of a rule."""
    return _effect("rules", read_in, "test_a_number_of_a_rule_is_the_argument_of_the_optimizer_of_that_name")


def _precision() -> FieldUse:
    return _effect("formats", _CHOICES, "test_mains_and_moments_are_kept_in_the_requested_formats")


def _scaling() -> FieldUse:
    return _effect("formats", _CHOICES, "test_the_loss_scale_follows_the_verdicts")


OPTIMIZER_FIELDS: Mapping[str, FieldUse] = MappingProxyType(
    {
        "lr": _rule(_GROUPS),
        "min_lr": FieldUse(_GROUPS, f"{_GROUP_TESTS}::test_a_group_starts_at_the_configured_numbers"),
        "decoupled_lr": FieldUse(_PRESETS, f"{_PRESET_TESTS}::test_decoupled_lr_moves_embedding_and_output_only"),
        "decoupled_min_lr": FieldUse(_PRESETS, f"{_PRESET_TESTS}::test_decoupled_lr_moves_embedding_and_output_only"),
        "weight_decay": _rule(_GROUPS),
        "apply_wd_to_qk_layernorm": FieldUse(
            _PRESETS, f"{_PRESET_TESTS}::test_qk_layernorm_is_decayed_only_if_requested"
        ),
        "fp8_recipe": FieldUse(_FP8, f"{_FP8_TESTS}::test_one_process_and_shards_have_the_same_codes"),
        "fp16": _precision(),
        "bf16": _precision(),
        "reuse_grad_buf_for_mxfp8_param_ag": FieldUse(
            "opt_stack.chunks.wrapped", f"{_REUSE_TESTS}::test_no_buffer_of_codes_is_made"
        ),
        "params_dtype": _precision(),
        "use_precision_aware_optimizer": _precision(),
        "store_param_remainders": _precision(),
        "main_grads_dtype": _effect("formats", _CHOICES, "test_gradients_are_summed_in_the_requested_dtype"),
        "main_params_dtype": _precision(),
        "exp_avg_dtype": _precision(),
        "exp_avg_sq_dtype": _precision(),
        "optimizer": _rule(_GROUPS),
        "loss_scale": _scaling(),
        "initial_loss_scale": _scaling(),
        "min_loss_scale": _scaling(),
        "loss_scale_window": _scaling(),
        "hysteresis": _scaling(),
        "adam_beta1": _rule(),
        "adam_beta2": _rule(),
        "adam_eps": _rule(),
        "decoupled_weight_decay": _rule(),
        "sgd_momentum": _rule(),
        "muon_momentum": _rule(),
        "muon_split_qkv": _effect(
            "rules", "opt_stack.planning.planner", "test_fused_rows_are_orthogonalised_one_by_one_unless_disabled"
        ),
        "muon_nesterov": _rule(),
        "muon_scale_mode": _rule(),
        "muon_fp32_matmul_prec": _rule(),
        "muon_coefficient_type": _rule(),
        "muon_num_ns_steps": _rule(),
        "muon_tp_mode": FieldUse(
            _RULES,
            "integration_tests/ranks/test_tensor_parallel.py::test_two_by_two_ranks_have_the_weights_and_norms_of_one",
        ),
        "muon_extra_scale_factor": _rule(),
        "muon_scalar_optimizer": FieldUse(
            _PRESETS, f"{_PRESET_TESTS}::test_parameters_other_than_hidden_matrices_use_the_scalar_optimizer"
        ),
        "lion_beta1": _rule(),
        "lion_beta2": _rule(),
        "soap_shampoo_beta": _rule(),
        "soap_precondition_frequency": _rule(),
        "soap_use_kl_shampoo": _rule(),
        "adaptive_muon_moment2_method": _rule(),
        "adaptive_muon_beta2": _rule(),
        "adaptive_muon_eps": _rule(),
        "use_distributed_optimizer": _effect("ranks", _CHOICES, "test_flat_shards_divide_the_state"),
        "use_layer_wise_distributed_optimizer": _effect("ranks", _CHOICES, "test_whole_matrices_are_dealt_to_ranks"),
        "overlap_param_gather": _effect(
            "ranks", "opt_stack.chunks.wrapped", "test_both_configurations_must_say_when_parameters_are_gathered"
        ),
        "overlap_param_gather_with_optimizer_step": _effect(
            "ranks", "opt_stack.planning.planner", "test_the_first_chunk_may_be_gathered_while_the_others_are_stepped"
        ),
        "optimizer_cpu_offload": _offload("test_offloaded_state_lives_and_moves_on_the_host"),
        "optimizer_offload_fraction": _offload("test_the_fraction_of_the_elements_lives_on_the_host"),
        "use_torch_optimizer_for_cpu_offload": FieldUse(
            "opt_stack.planning.planner", f"{_OFFLOAD_TESTS}::test_torch_updates_on_the_host_if_requested"
        ),
        "overlap_cpu_optimizer_d2h_h2d": _offload("test_copies_run_on_the_side_stream_if_requested"),
        "pin_cpu_grads": _offload("test_staging_is_pinned_if_requested"),
        "pin_cpu_params": _offload("test_staging_is_pinned_if_requested"),
        "clip_grad": _effect("formats", _BUILD, "test_gradients_are_scaled_down_to_the_requested_norm"),
        "grad_norm_skip_threshold": FieldUse(
            _BUILD, f"{_FACADE_TESTS}::test_a_norm_above_the_threshold_refuses_the_step"
        ),
        "log_num_zeros_in_grad": FieldUse(_BUILD, f"{_FACADE_TESTS}::test_the_zeros_of_all_gradients_are_counted"),
        "barrier_with_L1_time": FieldUse(_BUILD, f"{_FACADE_TESTS}::test_the_spans_have_megatron_cores_names"),
        "timers": FieldUse(_BUILD, f"{_FACADE_TESTS}::test_the_spans_have_megatron_cores_names"),
        "config_logger_dir": FieldUse(
            "opt_stack.factory",
            "packages/opt-stack/tests/test_records.py"
            "::test_the_resolved_configuration_and_the_plan_are_logged_if_requested",
        ),
        "optimizer_cuda_graph": FieldUse(
            "opt_stack.building.graphs",
            "integration_tests/device/test_step_as_graph.py::test_replays_give_the_bits_of_steps_in_every_order",
        ),
        "muon_use_syrk": _effect("rules", _RULES, "test_symmetric_products_are_computed_by_half"),
        "soap_order": _rule(),
        "soap_max_precond_dim": _rule(),
        "soap_one_sided": _rule(),
        "soap_split_qkv": _effect("rules", "opt_stack.planning.planner", "test_soap_splits_fused_rows_if_requested"),
        "optimizer_options": _rule(),
        "muon_weight_decay_method": _rule(),
        "adaptive_muon_lines": _effect("rules", _RULES, "test_normuon_keeps_the_requested_lines"),
    }
)

_WRAPPER = "opt_distributed.buffers.data_parallel"
_BUFFERS = "opt_distributed.buffers.chunk_buffers"
_GROUPING = "opt_distributed.buffers.grouping"
_WRAPPER_TESTS = "packages/opt-distributed/tests"
_FAULT_TESTS = f"{_WRAPPER_TESTS}/test_data_parallel_faults.py"

DATA_PARALLEL_FIELDS: Mapping[str, FieldUse] = MappingProxyType(
    {
        "grad_reduce_in_fp32": _effect("ranks", _GROUPING, "test_a_wrapper_reduces_in_the_requested_dtype"),
        "overlap_grad_reduce": _effect("ranks", _WRAPPER, "test_gradients_are_reduced_in_the_step_or_in_backward"),
        "overlap_param_gather": _effect("ranks", _WRAPPER, "test_parameters_are_gathered_in_the_step_or_before_use"),
        "align_param_gather": FieldUse(
            _WRAPPER, f"{_WRAPPER_TESTS}/test_gather_order.py::test_a_schedule_starts_the_gathers_that_are_aligned"
        ),
        "use_distributed_optimizer": _effect("ranks", _WRAPPER, "test_a_wrapper_reduces_everywhere_or_to_shards"),
        "num_distributed_optimizer_instances": FieldUse(
            "opt_distributed.buffers.agreement", f"{_FAULT_TESTS}::test_what_cannot_be_meant_is_refused"
        ),
        "check_for_nan_in_grad": FieldUse(
            _BUFFERS, f"{_FAULT_TESTS}::test_a_check_for_nan_names_the_parameter_and_stops_every_rank"
        ),
        "check_for_large_grads": FieldUse(
            _BUFFERS, f"{_WRAPPER_TESTS}/test_large_grads.py::test_a_gradient_ten_times_the_first_hundred_is_refused"
        ),
        "bucket_size": _effect("ranks", _GROUPING, "test_buckets_close_at_the_requested_size_if_something_overlaps"),
        "num_buckets": _effect("ranks", _GROUPING, "test_buckets_close_at_the_requested_size_if_something_overlaps"),
        "pad_buckets_for_high_nccl_busbw": _effect(
            "ranks", _GROUPING, "test_buckets_are_padded_to_the_size_at_which_links_are_fastest"
        ),
        "reduce_scatter_with_fp32_accumulation": _effect("ranks", _BUFFERS, "test_sums_in_fp32_travel_as_parts"),
        "param_name_patterns_for_fp32_local_accumulation": FieldUse(
            _BUFFERS, f"{_WRAPPER_TESTS}/test_local_sums.py::test_microbatches_of_the_parameters_named_add_up_in_fp32"
        ),
        "average_in_collective": _effect("ranks", _BUFFERS, "test_a_mean_may_be_taken_after_the_sum"),
        "fp8_param_gather": FieldUse(
            "opt_distributed.buffers.fp8_memory", f"{_FP8_TESTS}::test_one_byte_an_element_and_scales_are_gathered"
        ),
        "reuse_grad_buf_for_mxfp8_param_ag": FieldUse(
            "opt_distributed.buffers.chunk_buffers",
            f"{_REUSE_TESTS}::test_no_buffer_of_codes_is_made",
        ),
        "nccl_ub": FieldUse(
            _BUFFERS, f"{_WRAPPER_TESTS}/test_user_buffers.py::test_buffers_come_from_a_pool_registered_with_the_group"
        ),
        "disable_symmetric_registration": FieldUse(
            _BUFFERS, f"{_WRAPPER_TESTS}/test_user_buffers.py::test_registration_is_symmetric_unless_disabled"
        ),
    }
)


def fields_page() -> str:
    """The markdown page of all fields: the text of `docs/config_fields.md`."""
    return "\n".join(
        [
            "# Every field, where it is read, and the test that shows it",
            "",
            "Generated by `python -m opt_config fields`; a test keeps it current.",
            *_section("OptimizerConfig", OPTIMIZER_FIELDS),
            *_section("DistributedDataParallelConfig", DATA_PARALLEL_FIELDS),
            "",
            "These fields of Megatron-Core exist and accept only their defaults:",
            "",
            *(f"- `{name}`: {reason}" for name, reason in UNSUPPORTED_DATA_PARALLEL_FIELDS.items()),
            "",
        ]
    )


def _section(title: str, uses: Mapping[str, FieldUse]) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| field | read in | shown by |", "|---|---|---|")
    for name, use in uses.items():
        yield f"| `{name}` | `{use.read_in}` | `{use.shown_by.rpartition('::')[2]}` |"
