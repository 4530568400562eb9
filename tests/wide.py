"""The cases that `make test` leaves to `make test-wide`: the longest ones, of laws that other cases check too.

`conftest.py` marks them. `tests/repository/test_wide.py` looks for entries that no case has, and `scripts/mutants.py`
plants its mistakes before the cases of `make test` alone: what only a case here sees has no mutant.
"""

WIDE: dict[str, tuple[str, ...]] = {
    "examples/fields/tests/test_parity.py::test_every_layout_trains_as_one_process": ("unet-4, one empty",),
    "examples/fields/tests/test_runs.py::test_a_run_forecasts": (),
    "examples/fields/tests/test_runs.py::test_points_are_forecast_on_ranks_and_drawn": (),
    "tests/distributed/test_activation_checkpoint.py::test_context_parallel_attention_is_not_communicated_again": (),
    "tests/distributed/test_checkpoint_layouts.py::test_any_layout_resumes_from_any_other[tp2-ep2": (),
    "tests/distributed/test_compile.py::test_a_smaller_budget_keeps_less": (),
    "tests/distributed/test_evaluation.py::test_every_layout_finds_the_same[cp2+tp2": (),
    "tests/distributed/test_experts.py::test_a_layout_equals_one_process[cp2+tp2+ep4, compiled": (),
    "tests/distributed/test_families.py::test_a_layout_equals_one_process": (
        *("olmo3-tp2", "deepseek_v3-tp2", "granitemoehybrid-tp2", "smollm3-pp2"),
    ),
    "tests/distributed/test_families.py::test_adapters_of_hybrid_layers_train_on_ranks": (),
    "tests/distributed/test_families.py::test_gradients_are_those_of_transformers": (
        *("olmo3", "gemma3", "glm4_moe", "deepseek_v3", "qwen3_next", "granitemoehybrid", "phi3, LongRoPE"),
    ),
    "tests/distributed/test_generation.py::test_context_parallel_ranks_write_the_same": (
        "kimi_linear, cp2 of 4, ring",
    ),
    "tests/distributed/test_generation.py::test_tensor_parallel_ranks_write_the_same": (),
    "tests/distributed/test_keys.py::test_a_key_does_something": (
        *("parallelism.fsdp_reshard_after_forward", "training.enable_cpu_offload", "training.mixed_precision_reduce"),
        *("parallelism.disable_loss_parallel", "training.gc_freq", "metrics.log_freq"),
    ),
    "tests/distributed/test_keys.py::test_a_run_alone_is_not_different": ("training.gc_freq", "metrics.log_freq"),
    "tests/distributed/test_library_alone.py::test_a_transformers_model_trains_by_the_library_alone": (),
    "tests/distributed/test_lora.py::test_layouts_train_the_same_adapters[cp2+tp2": (),
    "tests/distributed/test_memory_together.py::test_losses_gradients_and_weights_are_those_of_one_process": (),
    "tests/distributed/test_multi_token.py::test_a_layout_equals_one_process[experts divided": (),
    "tests/distributed/test_muon.py::test_any_layout_resumes_from_any_other[tp2-ep2": (),
    "tests/distributed/test_pairs.py::test_a_combination_equals_one_process": (
        *("0 ", "4 ", "5 ", "10 ", "11 ", "12 "),
    ),
    "tests/distributed/test_planner.py::test_the_allocator_of_a_rank_reports_what_is_predicted[fsdp2+cp2": (),
    "tests/distributed/test_preferences.py::test_layouts_train_on_the_same_pairs[cp2+tp2": (),
    "tests/distributed/test_preferences.py::test_the_comparison_sees_answers_of_one_rank": (),
    "tests/distributed/test_qk_clip.py::test_a_layout_clips_as_one_process": ("cp2 tp2",),
    "tests/distributed/test_remote_checkpoints.py::test_a_store_that_stops_to_answer": (),
    "tests/distributed/test_sequence_chunks.py::test_nor_over_ranks[fsdp2+tp2": (),
    "tests/distributed/test_tiles.py::test_losses_gradients_and_weights_do_not_change[cp2+tp2": (),
    "tests/fake_cuda/test_fake_cuda.py::test_a_row_runs_and_its_host_never_waits": (),
    "tests/fake_cuda/test_fake_cuda.py::test_launches_messages_and_memory_are_those_committed": (),
    "tests/fake_cuda/test_fake_cuda.py::test_the_machine_sees_faults": (),
    "tests/integration/test_failures.py::test_a_rank_of_a_sequence_a_matrix_or_a_pipeline_fails": (),
    "tests/integration/test_launcher.py::test_the_exit_code_is_that_of_the_rank_that_failed": ("7-",),
    "tests/interpreted/linear_kernels.py::test_half_precision": (),
    "tests/interpreted/linear_kernels.py::test_maps_are_those_of_chunks": ("delta]",),
    "tests/interpreted/linear_kernels.py::test_one_process": (),
    "tests/interpreted/linear_kernels.py::test_ranks": ("delta-70-uneven-gathered",),
    "tests/interpreted/linear_kernels.py::test_the_operator_keeps_the_rules_of_operators": (),
    "tests/unit/test_hub.py::test_a_job_reads_the_hub_once": (),
    "tests/unit/test_hub.py::test_a_wrong_name_is_one_sentence[more3": (),
    "tests/unit/test_linear_kernels.py::test_kernels_are_the_recurrence[wide": (),
    "tests/unit/test_planner.py::test_a_deep_model_is_a_straight_line_over_shallow_ones": ("arguments0", "arguments4"),
    "tests/unit/test_planner_command.py::test_other_answers_as_json_print_json_alone": (),
    "tests/unit/test_planner.py::test_what_muon_sends_is_a_straight_line_where_ranks_own_alike": (),
}
"""The beginnings of names of cases -> the beginnings of their parameters that `make test` keeps."""


def is_wide(case: str) -> bool:
    """Return whether `make test` leaves a case out. case: its name, as pytest has it."""
    parameters = case.partition("[")[2]
    return any(case.startswith(name) and not parameters.startswith(kept) for name, kept in WIDE.items())
