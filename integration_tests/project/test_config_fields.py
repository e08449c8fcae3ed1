"""Every field of a configuration is read by a package, and has a test that fails if it has no effect."""

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_config.data_parallel_config import UNSUPPORTED_DATA_PARALLEL_FIELDS

ROOT = Path(__file__).parents[2]
# By configuration: test files, and the tests in them with the fields whose effect they show.
SHOWN: dict[Any, dict[str, dict[str, str]]] = {
    OptimizerConfig: {
        "integration_tests/steps/test_fields_of_rules.py": {
            "test_a_number_of_a_rule_is_the_argument_of_the_optimizer_of_that_name": (
                "lr weight_decay optimizer adam_beta1 adam_beta2 adam_eps decoupled_weight_decay sgd_momentum "
                "muon_momentum muon_nesterov muon_scale_mode muon_fp32_matmul_prec muon_coefficient_type "
                "muon_num_ns_steps muon_extra_scale_factor lion_beta1 lion_beta2 soap_shampoo_beta "
                "soap_precondition_frequency soap_use_kl_shampoo adaptive_muon_moment2_method adaptive_muon_beta2 "
                "adaptive_muon_eps soap_order soap_max_precond_dim soap_one_sided optimizer_options "
                "muon_weight_decay_method"
            ),
            "test_rows_that_a_parameter_marks_are_separate_matrices": "muon_split_qkv soap_split_qkv",
            "test_symmetric_products_are_computed_by_half": "muon_use_syrk",
            "test_values_have_the_names_of_the_drop_in": "adaptive_muon_lines",
        },
        "packages/opt-paramgroups/tests/test_groups.py": {
            "test_a_group_starts_at_the_configured_numbers": "min_lr",
        },
        "packages/opt-paramgroups/tests/test_presets.py": {
            "test_decoupled_lr_moves_embedding_and_output_only": "decoupled_lr decoupled_min_lr",
            "test_qk_layernorm_is_decayed_only_if_requested": "apply_wd_to_qk_layernorm",
            "test_parameters_other_than_hidden_matrices_use_the_scalar_optimizer": "muon_scalar_optimizer",
        },
        "integration_tests/fp8/test_fp8_params.py": {
            "test_one_process_and_shards_have_the_same_codes": "fp8_recipe",
        },
        "integration_tests/steps/test_fields_of_formats.py": {
            "test_mains_and_moments_are_kept_in_the_requested_formats": (
                "fp16 bf16 params_dtype use_precision_aware_optimizer store_param_remainders main_params_dtype "
                "exp_avg_dtype exp_avg_sq_dtype"
            ),
            "test_gradients_are_summed_in_the_requested_dtype": "main_grads_dtype",
            "test_the_loss_scale_follows_the_verdicts": (
                "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis"
            ),
            "test_gradients_are_scaled_down_to_the_requested_norm": "clip_grad",
        },
        "integration_tests/fp8/test_fp8_through_grads.py": {
            "test_no_buffer_of_codes_is_made": "reuse_grad_buf_for_mxfp8_param_ag",
        },
        "integration_tests/ranks/test_tensor_parallel.py": {
            "test_the_update_is_the_same_at_any_tensor_parallel_size": "muon_tp_mode",
        },
        "integration_tests/steps/test_fields_of_ranks.py": {
            "test_flat_shards_divide_the_state": "use_distributed_optimizer",
            "test_whole_matrices_are_dealt_to_ranks": "use_layer_wise_distributed_optimizer",
            "test_both_configurations_must_say_when_parameters_are_gathered": "overlap_param_gather",
            "test_the_first_chunk_may_be_gathered_while_the_others_are_stepped": (
                "overlap_param_gather_with_optimizer_step"
            ),
        },
        "integration_tests/offload/test_offload.py": {
            "test_offloaded_state_lives_and_moves_on_the_host": "optimizer_cpu_offload",
            "test_the_fraction_of_the_elements_lives_on_the_host": "optimizer_offload_fraction",
            "test_torch_updates_on_the_host_if_requested": "use_torch_optimizer_for_cpu_offload",
            "test_copies_run_on_the_side_stream_if_requested": "overlap_cpu_optimizer_d2h_h2d",
            "test_staging_is_pinned_if_requested": "pin_cpu_grads pin_cpu_params",
        },
        "packages/opt-stack/tests/test_facade.py": {
            "test_a_norm_above_the_threshold_refuses_the_step": "grad_norm_skip_threshold",
            "test_the_zeros_of_all_gradients_are_counted": "log_num_zeros_in_grad",
            "test_the_spans_have_megatron_cores_names": "barrier_with_L1_time timers",
        },
        "packages/opt-stack/tests/test_records.py": {
            "test_the_resolved_configuration_and_the_plan_are_logged_if_requested": "config_logger_dir",
        },
        "integration_tests/device/test_step_as_graph.py": {
            "test_replays_give_the_bits_of_steps_in_every_order": "optimizer_cuda_graph",
        },
    },
    DistributedDataParallelConfig: {
        "integration_tests/steps/test_fields_of_ranks.py": {
            "test_a_wrapper_reduces_in_the_requested_dtype": "grad_reduce_in_fp32",
            "test_gradients_are_reduced_in_the_step_or_in_backward": "overlap_grad_reduce",
            "test_parameters_are_gathered_in_the_step_or_before_use": "overlap_param_gather",
            "test_a_wrapper_reduces_everywhere_or_to_shards": "use_distributed_optimizer",
            "test_buckets_close_at_the_requested_size_if_something_overlaps": "bucket_size num_buckets",
            "test_buckets_are_padded_to_the_size_at_which_links_are_fastest": "pad_buckets_for_high_nccl_busbw",
            "test_sums_in_fp32_travel_as_parts": "reduce_scatter_with_fp32_accumulation",
            "test_a_mean_may_be_taken_after_the_sum": "average_in_collective",
        },
        "packages/opt-distributed/tests/test_gather_order.py": {
            "test_a_schedule_starts_the_gathers_that_are_aligned": "align_param_gather",
        },
        "packages/opt-distributed/tests/test_data_parallel_faults.py": {
            "test_what_cannot_be_meant_is_refused": "num_distributed_optimizer_instances",
            "test_a_check_for_nan_names_the_parameter_and_stops_every_rank": "check_for_nan_in_grad",
        },
        "packages/opt-distributed/tests/test_grad_checks.py": {
            "test_a_gradient_ten_times_the_first_hundred_is_refused": "check_for_large_grads",
        },
        "packages/opt-distributed/tests/test_local_sums.py": {
            "test_microbatches_of_the_parameters_named_add_up_in_fp32": (
                "param_name_patterns_for_fp32_local_accumulation"
            ),
        },
        "integration_tests/fp8/test_fp8_params.py": {
            "test_one_byte_an_element_and_scales_are_gathered": "fp8_param_gather",
        },
        "integration_tests/fp8/test_fp8_through_grads.py": {
            "test_no_buffer_of_codes_is_made": "reuse_grad_buf_for_mxfp8_param_ag",
        },
        "packages/opt-distributed/tests/test_user_buffers.py": {
            "test_buffers_come_from_a_pool_registered_with_the_group": "nccl_ub",
            "test_registration_is_symmetric_unless_disabled": "disable_symmetric_registration",
        },
    },
}
TESTS = [
    pytest.param(file, test, names.split(), id=f"{test[5:65]}")
    for of_config in SHOWN.values()
    for file, tests in of_config.items()
    for test, names in tests.items()
]


@pytest.mark.parametrize("config", SHOWN)
def test_every_field_is_read_and_has_a_test(config: Any) -> None:
    fields = {field.name for field in dataclasses.fields(config)} - UNSUPPORTED_DATA_PARALLEL_FIELDS.keys()
    listed = [name for tests in SHOWN[config].values() for names in tests.values() for name in names.split()]
    assert sorted(listed) == sorted(fields), "list the new field here with the test that shows its effect"
    sources = [path for path in ROOT.glob("packages/*/src/*/**/*.py") if path.parent.name != "opt_config"]
    sources.append(ROOT / "packages/opt-config/src/opt_config/optimizer_config.py")
    read = {
        node.attr
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert fields - read == set()


@pytest.mark.parametrize(("file", "test", "fields"), TESTS)
def test_a_test_that_names_the_field_shows_what_it_changes(file: str, test: str, fields: list[str]) -> None:
    source = (ROOT / file).read_text()
    assert f"def {test}(" in source
    assert [name for name in fields if name not in source] == []
