"""The module that reads each field of a configuration, and the test that fails if the field has no effect."""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import NamedTuple

from opt_config import Configuration, DistributedDataParallelConfig, OptimizerConfig


class FieldUse(NamedTuple):
    """Where a field is used and tested."""

    read_in: str  # the module that reads it
    shown_by: str  # test that fails if the field has no effect: path from the repository root::name


_CHOICES = "opt_config.optimizer_config"
_GROUPS = "opt_paramgroups.groups"
_PRESETS = "opt_paramgroups.presets"
_BUILD = "opt_stack.building.build"
_RULES = "opt_stack.rules.registry"
_PLANNER = "opt_stack.planning.planner"
_CHUNKS = "opt_stack.planning.wrapped"
_WRAPPER = "opt_distributed.buffers.data_parallel"
_BUFFERS = "opt_distributed.buffers.chunk_buffers"
_BUFFER_PLAN = "opt_distributed.buffers.planner"

_RULE_TESTS = "integration_tests/steps/test_fields_of_rules.py"
_FORMAT_TESTS = "integration_tests/steps/test_fields_of_formats.py"
_RANK_TESTS = "integration_tests/steps/test_fields_of_ranks.py"
_FP8_TESTS = "integration_tests/fp8/test_fp8_params.py"
_REUSE_TESTS = "integration_tests/fp8/test_fp8_through_grads.py"
_PRESET_TESTS = "packages/opt-paramgroups/tests/test_presets.py"
_OFFLOAD_TESTS = "integration_tests/offload/test_offload.py"
_FACADE_TESTS = "packages/opt-stack/tests/test_facade.py"
_FAULT_TESTS = "packages/opt-distributed/tests/test_data_parallel_faults.py"
_USER_BUFFER_TESTS = "packages/opt-distributed/tests/test_user_buffers.py"


def _by_field(cls: type[Configuration], uses: Mapping[tuple[str, str], str]) -> Mapping[str, FieldUse]:
    """The use of each field of `cls`, in its order, from the names of the fields that are read and shown together."""
    found = {name: FieldUse(*use) for use, names in uses.items() for name in names.split()}
    return MappingProxyType({field.name: found[field.name] for field in fields(cls) if field.name in found})  # type: ignore[arg-type]


OPTIMIZER_FIELDS: Mapping[str, FieldUse] = _by_field(
    OptimizerConfig,
    {
        (_GROUPS, f"{_RULE_TESTS}::test_a_number_of_a_rule_is_the_argument_of_the_optimizer_of_that_name"): (
            "lr weight_decay optimizer"
        ),
        (_GROUPS, "packages/opt-paramgroups/tests/test_groups.py::test_a_group_starts_at_the_configured_numbers"): (
            "min_lr"
        ),
        (_PRESETS, f"{_PRESET_TESTS}::test_decoupled_lr_moves_embedding_and_output_only"): (
            "decoupled_lr decoupled_min_lr"
        ),
        (_PRESETS, f"{_PRESET_TESTS}::test_qk_layernorm_is_decayed_only_if_requested"): "apply_wd_to_qk_layernorm",
        ("opt_stack.planning.checks", f"{_FP8_TESTS}::test_one_process_and_shards_have_the_same_codes"): "fp8_recipe",
        (_CHOICES, f"{_FORMAT_TESTS}::test_mains_and_moments_are_kept_in_the_requested_formats"): (
            "fp16 bf16 params_dtype use_precision_aware_optimizer store_param_remainders main_params_dtype "
            "exp_avg_dtype exp_avg_sq_dtype"
        ),
        (_CHUNKS, f"{_REUSE_TESTS}::test_no_buffer_of_codes_is_made"): "reuse_grad_buf_for_mxfp8_param_ag",
        (_CHOICES, f"{_FORMAT_TESTS}::test_gradients_are_summed_in_the_requested_dtype"): "main_grads_dtype",
        (_CHOICES, f"{_FORMAT_TESTS}::test_the_loss_scale_follows_the_verdicts"): (
            "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"
        ),
        (_RULES, f"{_RULE_TESTS}::test_a_number_of_a_rule_is_the_argument_of_the_optimizer_of_that_name"): (
            "adam_beta1 adam_beta2 adam_eps decoupled_weight_decay sgd_momentum muon_momentum muon_nesterov "
            "muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type muon_num_ns_steps muon_extra_scale_factor "
            "lion_beta1 lion_beta2 soap_shampoo_beta soap_precondition_frequency soap_use_kl_shampoo "
            "adaptive_muon_moment2_method adaptive_muon_beta2 adaptive_muon_eps soap_order soap_max_precond_dim "
            "soap_one_sided optimizer_options muon_weight_decay_method"
        ),
        (_PLANNER, f"{_RULE_TESTS}::test_fused_rows_are_orthogonalised_one_by_one_unless_disabled"): "muon_split_qkv",
        (
            _RULES,
            "integration_tests/ranks/test_tensor_parallel.py::test_the_update_is_the_same_at_any_tensor_parallel_size",
        ): "muon_tp_mode",
        (_PRESETS, f"{_PRESET_TESTS}::test_parameters_other_than_hidden_matrices_use_the_scalar_optimizer"): (
            "muon_scalar_optimizer"
        ),
        (_CHOICES, f"{_RANK_TESTS}::test_flat_shards_divide_the_state"): "use_distributed_optimizer",
        (_CHOICES, f"{_RANK_TESTS}::test_whole_matrices_are_dealt_to_ranks"): "use_layer_wise_distributed_optimizer",
        (_CHUNKS, f"{_RANK_TESTS}::test_both_configurations_must_say_when_parameters_are_gathered"): (
            "overlap_param_gather"
        ),
        (_PLANNER, f"{_RANK_TESTS}::test_the_first_chunk_may_be_gathered_while_the_others_are_stepped"): (
            "overlap_param_gather_with_optimizer_step"
        ),
        (_CHOICES, f"{_OFFLOAD_TESTS}::test_offloaded_state_lives_and_moves_on_the_host"): "optimizer_cpu_offload",
        (_CHOICES, f"{_OFFLOAD_TESTS}::test_the_fraction_of_the_elements_lives_on_the_host"): (
            "optimizer_offload_fraction"
        ),
        (_PLANNER, f"{_OFFLOAD_TESTS}::test_torch_updates_on_the_host_if_requested"): (
            "use_torch_optimizer_for_cpu_offload"
        ),
        (_CHOICES, f"{_OFFLOAD_TESTS}::test_copies_run_on_the_side_stream_if_requested"): (
            "overlap_cpu_optimizer_d2h_h2d"
        ),
        (_CHOICES, f"{_OFFLOAD_TESTS}::test_staging_is_pinned_if_requested"): "pin_cpu_grads pin_cpu_params",
        (_BUILD, f"{_FORMAT_TESTS}::test_gradients_are_scaled_down_to_the_requested_norm"): "clip_grad",
        (_BUILD, f"{_FACADE_TESTS}::test_a_norm_above_the_threshold_refuses_the_step"): "grad_norm_skip_threshold",
        (_BUILD, f"{_FACADE_TESTS}::test_the_zeros_of_all_gradients_are_counted"): "log_num_zeros_in_grad",
        (_BUILD, f"{_FACADE_TESTS}::test_the_spans_have_megatron_cores_names"): "barrier_with_L1_time timers",
        (
            "opt_stack.factory",
            "packages/opt-stack/tests/test_records.py"
            "::test_the_resolved_configuration_and_the_plan_are_logged_if_requested",
        ): "config_logger_dir",
        (
            "opt_stack.building.build",
            "integration_tests/device/test_step_as_graph.py::test_replays_give_the_bits_of_steps_in_every_order",
        ): "optimizer_cuda_graph",
        (_RULES, f"{_RULE_TESTS}::test_symmetric_products_are_computed_by_half"): "muon_use_syrk",
        (_PLANNER, f"{_RULE_TESTS}::test_soap_splits_fused_rows_if_requested"): "soap_split_qkv",
        (_RULES, f"{_RULE_TESTS}::test_normuon_keeps_the_requested_lines"): "adaptive_muon_lines",
    },
)

DATA_PARALLEL_FIELDS: Mapping[str, FieldUse] = _by_field(
    DistributedDataParallelConfig,
    {
        (_BUFFERS, f"{_RANK_TESTS}::test_a_wrapper_reduces_in_the_requested_dtype"): "grad_reduce_in_fp32",
        (_WRAPPER, f"{_RANK_TESTS}::test_gradients_are_reduced_in_the_step_or_in_backward"): "overlap_grad_reduce",
        (_WRAPPER, f"{_RANK_TESTS}::test_parameters_are_gathered_in_the_step_or_before_use"): "overlap_param_gather",
        (
            _WRAPPER,
            "packages/opt-distributed/tests/test_gather_order.py::test_a_schedule_starts_the_gathers_that_are_aligned",
        ): "align_param_gather",
        (_WRAPPER, f"{_RANK_TESTS}::test_a_wrapper_reduces_everywhere_or_to_shards"): "use_distributed_optimizer",
        ("opt_distributed.buffers.chunk_buffers", f"{_FAULT_TESTS}::test_what_cannot_be_meant_is_refused"): (
            "num_distributed_optimizer_instances"
        ),
        (_BUFFERS, f"{_FAULT_TESTS}::test_a_check_for_nan_names_the_parameter_and_stops_every_rank"): (
            "check_for_nan_in_grad"
        ),
        (
            _BUFFERS,
            "packages/opt-distributed/tests/test_grad_checks.py"
            "::test_a_gradient_ten_times_the_first_hundred_is_refused",
        ): "check_for_large_grads",
        (_BUFFER_PLAN, f"{_RANK_TESTS}::test_buckets_close_at_the_requested_size_if_something_overlaps"): (
            "bucket_size num_buckets"
        ),
        (_BUFFERS, f"{_RANK_TESTS}::test_buckets_are_padded_to_the_size_at_which_links_are_fastest"): (
            "pad_buckets_for_high_nccl_busbw"
        ),
        (
            "opt_distributed.buffers.wires",
            f"{_RANK_TESTS}::test_sums_in_fp32_travel_as_parts",
        ): "reduce_scatter_with_fp32_accumulation",
        (
            _BUFFERS,
            "packages/opt-distributed/tests/test_local_sums.py"
            "::test_microbatches_of_the_parameters_named_add_up_in_fp32",
        ): "param_name_patterns_for_fp32_local_accumulation",
        (_BUFFERS, f"{_RANK_TESTS}::test_a_mean_may_be_taken_after_the_sum"): "average_in_collective",
        ("opt_distributed.buffers.param_wires", f"{_FP8_TESTS}::test_one_byte_an_element_and_scales_are_gathered"): (
            "fp8_param_gather"
        ),
        (_BUFFERS, f"{_REUSE_TESTS}::test_no_buffer_of_codes_is_made"): "reuse_grad_buf_for_mxfp8_param_ag",
        (_BUFFERS, f"{_USER_BUFFER_TESTS}::test_buffers_come_from_a_pool_registered_with_the_group"): "nccl_ub",
        (_BUFFERS, f"{_USER_BUFFER_TESTS}::test_registration_is_symmetric_unless_disabled"): (
            "disable_symmetric_registration"
        ),
    },
)
