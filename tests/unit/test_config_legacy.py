"""Older spellings mean what today's do, from a file and from the command line, with one note each."""

import json

import pytest

from trainer.config.errors import ConfigError
from trainer.config.keys import keys_of
from trainer.config.loader import parse_command_line
from trainer.config.schema import JobConfig
from trainer.config.torchtitan import ABSENT, OLDER, rewrite

# older spelling, value -> today's key, value
CASES = [
    ("profiling.run_profiler", True, "profiling.enable_profiling", True),
    ("profiling.profile_every_x_iter", 7, "profiling.profile_freq", 7),
    ("training.checkpoint_interval", 40, "checkpoint.interval", 40),
    ("training.pipeline_parallel_degree", 2, "parallelism.pipeline_parallel_degree", 2),
    ("training.data_parallel_replicate_degree", 2, "parallelism.data_parallel_replicate_degree", 2),
    ("training.data_parallel_shard_degree", 4, "parallelism.data_parallel_shard_degree", 4),
    ("training.tensor_parallel_degree", 2, "parallelism.tensor_parallel_degree", 2),
    ("experimental.context_parallel_degree", 2, "parallelism.context_parallel_degree", 2),
    ("experimental.context_parallel_rotate_method", "alltoall", "parallelism.context_parallel_method", "ring"),
    ("experimental.context_parallel_rotate_method", "allgather", "parallelism.context_parallel_method", "all_gather"),
    ("training.enable_loss_parallel", False, "parallelism.disable_loss_parallel", True),
    ("training.enable_loss_parallel", True, "parallelism.disable_loss_parallel", False),
    ("experimental.enable_async_tensor_parallel", True, "parallelism.enable_async_tensor_parallel", True),
    ("experimental.pipeline_parallel_degree", 2, "parallelism.pipeline_parallel_degree", 2),
    ("experimental.pipeline_parallel_schedule", "gpipe", "parallelism.pipeline_parallel_schedule", "GPipe"),
    (
        "experimental.pipeline_parallel_schedule",
        "flexible_interleaved_1f1b",
        "parallelism.pipeline_parallel_schedule",
        "Interleaved1F1B",
    ),
    ("experimental.pipeline_parallel_microbatch_size", 2, "parallelism.pipeline_parallel_microbatch_size", 2),
    ("experimental.pipeline_parallel_layers_per_stage", 2, "parallelism.pipeline_parallel_layers_per_stage", 2),
    ("experimental.pipeline_parallel_schedule", "1f1b", "parallelism.pipeline_parallel_schedule", "1F1B"),
    ("parallelism.context_parallel_rotate_method", "alltoall", "parallelism.context_parallel_method", "ring"),
    (
        "parallelism.module_fqns_per_model_part",
        [["tok_embeddings", "layers.0"], ["norm", "output"]],
        "parallelism.pipeline_parallel_module_fqns",
        ("tok_embeddings,layers.0", "norm,output"),
    ),
    ("model.hf_assets_path", "./assets/hf", "model.tokenizer_path", "./assets/hf"),
    ("model.converters", ["quantize.linear.float8"], "float8.enable", True),
    ("lr_scheduler.lr_min", 0.1, "lr_scheduler.min_lr_factor", 0.1),
    ("scheduler.lr_min", 0.1, "lr_scheduler.min_lr_factor", 0.1),
    ("validation.enabled", True, "validation.enable", True),
    ("scheduler.warmup_steps", 7, "lr_scheduler.warmup_steps", 7),
    ("scheduler.decay_ratio", 0.5, "lr_scheduler.decay_ratio", 0.5),
    ("scheduler.decay_type", "cosine", "lr_scheduler.decay_type", "cosine"),
    ("training.data_parallel_degree", 4, "parallelism.data_parallel_shard_degree", 4),
    ("training.fsdp_reshard_after_forward", "never", "parallelism.fsdp_reshard_after_forward", "never"),
    ("training.disable_loss_parallel", True, "parallelism.disable_loss_parallel", True),
    ("quantize.linear.float8.recipe_name", "rowwise", "float8.recipe_name", "rowwise"),
    ("quantize.linear.float8.emulate", True, "float8.emulate", True),
    ("quantize.linear.float8.filter_fqns", ["wk"], "float8.filter_fqns", ("wk",)),
    (
        "quantize.linear.float8.enable_fsdp_float8_all_gather",
        True,
        "float8.enable_fsdp_float8_all_gather",
        True,
    ),
    ("debug.seed", 42, "training.seed", 42),
    ("debug.deterministic", True, "training.deterministic", True),
    ("training.batch_size", 3, "training.local_batch_size", 3),
    ("training.warmup_steps", 5, "lr_scheduler.warmup_steps", 5),
    ("training.compile", True, "compile.enable", True),
    ("checkpoint.enable_checkpoint", True, "checkpoint.enable", True),
    ("checkpoint.model_weights_only", True, "checkpoint.last_save_model_only", True),
    ("experimental.custom_import", "json", "job.imports", ("json",)),
    ("checkpoint.last_save_model_weights_only", True, "checkpoint.last_save_model_only", True),
    ("checkpoint.initial_load_model_weights_only", False, "checkpoint.initial_load_model_only", False),
    ("float8.enable_float8_linear", True, "float8.enable", True),
    ("training.fp8_linear", "dynamic", "float8.enable", True),
    ("optimizer.fused", True, "optimizer.implementation", "fused"),
    ("optimizer.fused", False, "optimizer.implementation", "foreach"),
]


def as_toml(key: str, value: object) -> str:
    table, _, name = key.rpartition(".")
    return f"[{table}]\n{name} = {json.dumps(value)}\n"


def as_options(key: str, value: object) -> list[list[str]]:
    table, _, name = key.rpartition(".")
    if isinstance(value, list) and isinstance(value[0], list):
        return []  # for files only
    if value is True:
        return [[f"--{key}"], [f"--{table}.{name.replace('_', '-')}"]]
    if value is False:
        return [[f"--{table}.no_{name}"], [f"--{table}.no-{name}"], [f"--no-{key}"]]
    words = value if isinstance(value, list) else [str(value)]
    return [[f"--{key}", *words], [f"--{key}={words[0]}", *words[1:]]]


def test_the_cases_cover_the_table():
    assert {old for old, *_ in CASES} == set(OLDER)
    assert {spelling.key for spelling in OLDER.values()} <= set(keys_of(JobConfig))
    assert not set(OLDER) & set(keys_of(JobConfig))
    assert not set(ABSENT) & (set(OLDER) | set(keys_of(JobConfig)))


@pytest.mark.parametrize(("old", "value", "key", "new"), CASES)
def test_an_older_spelling_equals_todays(old, value, key, new, tmp_path):
    (tmp_path / "old.toml").write_text(as_toml(old, value))
    sources = [["--job.config_file", str(tmp_path / "old.toml")], *as_options(old, value)]
    for argv in sources:
        command = parse_command_line(argv)
        table, _, name = key.partition(".")
        assert getattr(getattr(command.config, table), name) == new
        (note,) = command.notes
        assert old in note
        assert key in note
        assert "\n" not in note


def test_a_rotation_that_is_gone_is_refused():
    with pytest.raises(ConfigError, match=r"'addtoall' has no counterpart.*'ring'"):
        parse_command_line(["--experimental.context_parallel_rotate_method", "addtoall"])


def test_a_float8_scaling_that_is_gone_is_refused():
    with pytest.raises(ConfigError, match=r"'delayed' has no counterpart.*float8.enable"):
        parse_command_line(["--training.fp8_linear", "delayed"])
    assert not parse_command_line(["--training.fp8_linear="]).config.float8.enable


def test_a_setting_without_effect_is_said_to_be_ignored():
    command = parse_command_line(["--job.use_for_integration_test"])
    assert command.config == parse_command_line([]).config
    (note,) = command.notes
    assert "job.use_for_integration_test = true" in note
    assert "ignored" in note


def test_two_spellings_with_different_values_in_one_source_are_refused(tmp_path):
    (tmp_path / "both.toml").write_text("[training]\nbatch_size = 4\nlocal_batch_size = 8\n")
    argv = ["--training.local_batch_size", "8", "--training.batch_size", "4"]
    for arguments in (argv, ["--job.config_file", str(tmp_path / "both.toml")]):
        with pytest.raises(ConfigError) as error:
            parse_command_line(arguments)
        message = str(error.value)
        for part in ("training.batch_size = 4", "training.local_batch_size = 8", "keep"):
            assert part in message
        assert "\n" not in message


def test_two_spellings_with_one_value_are_fine():
    assert rewrite({"training.batch_size": 4, "training.local_batch_size": 4}, "here").values == {
        "training.local_batch_size": 4
    }


def test_the_command_line_goes_over_the_file_whatever_the_spelling(tmp_path):
    for in_file, on_line in (("local_batch_size", "batch_size"), ("batch_size", "local_batch_size")):
        (tmp_path / "run.toml").write_text(f"[training]\n{in_file} = 4\n")
        argv = ["--job.config_file", str(tmp_path / "run.toml"), f"--training.{on_line}", "8"]
        assert parse_command_line(argv).config.training.local_batch_size == 8


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--training.batch_size", "many"], "training.batch_size = 'many'"),
        (["--optimizer.fused", "2"], "optimizer.fused = '2'"),
    ],
)
def test_the_type_of_an_older_spelling_is_checked(argv, part):
    with pytest.raises(ConfigError) as error:
        parse_command_line(argv)
    assert part in str(error.value)


def test_rewriting_changes_nothing_else_and_not_its_input():
    values = {"training.batch_size": 4, "training.steps": 3}
    assert rewrite(values, "here").values == {"training.steps": 3, "training.local_batch_size": 4}
    assert values == {"training.batch_size": 4, "training.steps": 3}
