"""Tables of torchtitan's settings that have another name here, or no counterpart.

They are the keys of its TOML files from 2024 to 2026 that matter for a Llama. docs/torchtitan.md lists them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.schema import Parallelism


@dataclass(frozen=True)
class Spelling:
    """An older key of a setting: today's key, the change in words, the type of the older value, and its conversion.

    kind: None means the type of today's key.
    """

    key: str
    words: str = ""
    kind: Any = None
    convert: Callable[[Any], object] = lambda value: value


@dataclass(frozen=True)
class Absent:
    """A setting of a feature that this program does not have.

    off: values that are ignored; None: all of them. instead: what to do if another value is refused; needs: today's
    switch without which every value is ignored.
    """

    kind: Any
    off: tuple[object, ...] | None
    instead: str = ""
    needs: str = ""


def _rotation(key: str) -> Callable[[str], str]:
    """Return a converter of how K/V travel: to the next rank ("alltoall"), or gathered at once ("allgather")."""

    def convert(how: str) -> str:
        if how in ("alltoall", "allgather"):
            return {"alltoall": "ring", "allgather": "all_gather"}[how]
        raise ConfigError(
            f"{key} = {how!r} has no counterpart here; use parallelism.context_parallel_method = 'ring' or "
            f"'all_gather' (once 'alltoall' and 'allgather')"
        )

    return convert


def _schedule(name: str) -> str:
    """Return today's name of a pipeline schedule, once in lower case and with underscores."""
    today = get_args(get_type_hints(Parallelism)["pipeline_parallel_schedule"])
    names = {choice.lower(): choice for choice in today} | {"flexibleinterleaved1f1b": "Interleaved1F1B"}
    if (plain := name.lower().replace("_", "")) in names:
        return names[plain]
    raise ConfigError(f"experimental.pipeline_parallel_schedule = {name!r} is no schedule{did_you_mean(name, today)}")


def _fp8_linear(how: str) -> bool:
    """Return whether float8 is on: "dynamic" scales from the tensor itself, or "" for off."""
    if how in ("dynamic", ""):
        return how == "dynamic"
    raise ConfigError(f"training.fp8_linear = {how!r} has no counterpart here; use float8.enable (once 'dynamic')")


def _converters(names: Sequence[str]) -> bool:
    """Return whether linear modules are converted to float8, the only converter."""
    for name in names:
        if name not in ("float8", "quantize.linear.float8"):
            raise ConfigError(
                f"model.converters = {list(names)}: {name!r} has no counterpart here; use 'float8', which is "
                f"float8.enable, or leave it out"
            )
    return bool(names)


_STRINGS = tuple[str, ...]
_METHOD = '`"alltoall"` is `"ring"`, `"allgather"` is `"all_gather"`'


def _moved(table: str, keys: str, to: str) -> dict[str, Spelling]:
    """Return keys that have only moved to another table."""
    return {f"{table}.{key}": Spelling(f"{to}.{key}") for key in keys.split()}


OLDER: dict[str, Spelling] = {
    "metrics.disable_color_printing": Spelling(
        "metrics.enable_color_printing", "inverted", bool, lambda disable: not disable
    ),
    "model.hf_assets_path": Spelling(
        "model.tokenizer_path", "a folder that holds `original/tokenizer.model`, `tokenizer.json` or `tokenizer.model`"
    ),
    "model.converters": Spelling(
        "float8.enable",
        '`["float8"]` and `["quantize.linear.float8"]` are true, `[]` is false',
        _STRINGS,
        _converters,
    ),
    "optimizer.fused": Spelling(
        "optimizer.implementation",
        'true is `"fused"`, false is `"foreach"`',
        bool,
        lambda on: "fused" if on else "foreach",
    ),
    "checkpoint.last_save_model_weights_only": Spelling("checkpoint.last_save_model_only"),
    "checkpoint.initial_load_model_weights_only": Spelling("checkpoint.initial_load_model_only"),
    "lr_scheduler.lr_min": Spelling("lr_scheduler.min_lr_factor"),
    **_moved("scheduler", "warmup_steps decay_ratio decay_type", "lr_scheduler"),
    "scheduler.lr_min": Spelling("lr_scheduler.min_lr_factor"),
    "profiling.run_profiler": Spelling("profiling.enable_profiling"),
    "profiling.profile_every_x_iter": Spelling("profiling.profile_freq"),
    "training.checkpoint_interval": Spelling("checkpoint.interval"),
    "training.batch_size": Spelling("training.local_batch_size"),
    "validation.enabled": Spelling("validation.enable"),
    "training.warmup_steps": Spelling("lr_scheduler.warmup_steps"),
    "training.compile": Spelling("compile.enable"),
    "training.fp8_linear": Spelling("float8.enable", '`"dynamic"` is true, `""` is false', str, _fp8_linear),
    "training.data_parallel_degree": Spelling("parallelism.data_parallel_shard_degree"),
    **_moved(
        "training",
        "data_parallel_replicate_degree data_parallel_shard_degree tensor_parallel_degree pipeline_parallel_degree "
        "fsdp_reshard_after_forward "
        "disable_loss_parallel",
        "parallelism",
    ),
    "training.enable_loss_parallel": Spelling(
        "parallelism.disable_loss_parallel", "inverted", bool, lambda enable: not enable
    ),
    **{
        f"{table}.context_parallel_rotate_method": Spelling(
            "parallelism.context_parallel_method", _METHOD, str, _rotation(f"{table}.context_parallel_rotate_method")
        )
        for table in ("parallelism", "experimental")
    },
    "parallelism.module_fqns_per_model_part": Spelling(
        "parallelism.pipeline_parallel_module_fqns",
        "the names of a stage in one string, separated by commas",
        tuple[_STRINGS, ...],
        lambda stages: tuple(",".join(names) for names in stages),
    ),
    **_moved(
        "experimental",
        "context_parallel_degree enable_async_tensor_parallel pipeline_parallel_degree pipeline_parallel_schedule_csv "
        "pipeline_parallel_microbatch_size pipeline_parallel_microbatches pipeline_parallel_layers_per_stage",
        "parallelism",
    ),
    "experimental.pipeline_parallel_schedule": Spelling(
        "parallelism.pipeline_parallel_schedule", "in lower case and with underscores too", str, _schedule
    ),
    "experimental.pipeline_parallel_split_points": Spelling(
        "parallelism.pipeline_parallel_split_points",
        "commas within a string separate names",
        _STRINGS,
        lambda points: tuple(name.strip() for point in points for name in point.split(",")),
    ),
    "checkpoint.enable_checkpoint": Spelling("checkpoint.enable"),
    "float8.enable_float8_linear": Spelling("float8.enable"),
    **_moved(
        "quantize.linear.float8",
        "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name filter_fqns emulate",
        "float8",
    ),
    **_moved("debug", "seed deterministic", "training"),
}

# Older or other values of today's keys, and their names here; None: the default.
OLDER_VALUES: dict[str, dict[str, str | None]] = {
    "model.name": {"llama": "llama3"},
    "model.norm_type": {"fused_rmsnorm": "rmsnorm", "compiled_rmsnorm": "rmsnorm"},
    "parallelism.pipeline_parallel_schedule_csv": {"": None},
    "checkpoint.initial_load_path": {"": None},
}

# Keys whose value is a list today, and was one string with commas once.
ONCE_STRINGS = frozenset({"float8.filter_fqns"})


def _refused(keys: str, *off: object, instead: str = "leave it out", needs: str = "") -> dict[str, Absent]:
    """Return settings that are refused with another value than those of `off`."""
    kind = _STRINGS if isinstance(off[0], tuple) else type(off[0])
    return {key: Absent(kind, off, instead, needs) for key in keys.split()}


# Settings of a feature that is off, or that change nothing here, by type.
_IGNORED = {
    bool: """
        job.use_for_integration_test job.print_args job.print_config
        parallelism.pipeline_parallel_expert_parallel_overlap
        debug.moe_force_load_balance activation_checkpoint.early_stop activation_checkpoint.preserve_rng_state
        float8.force_recompute_fp8_weight_in_bwd checkpoint.initial_load_in_hf
        checkpoint.enable_ft_dataloader_checkpoints
        fault_tolerance.should_quantize memory_estimation.disable_fake_mode validation.dataloader.persistent_workers
        validation.dataloader.pin_memory training.dataloader.persistent_workers training.dataloader.pin_memory""",
    int: """
        fault_tolerance.process_group_timeout_ms fault_tolerance.replica_id fault_tolerance.group_size
        fault_tolerance.min_replica_size fault_tolerance.sync_steps fault_tolerance.fragment_sync_delay
        validation.dataloader.num_workers validation.dataloader.prefetch_factor
        training.data_workers training.dataloader.num_workers training.dataloader.prefetch_factor""",
    float: "fault_tolerance.fragment_update_alpha",
    str: """
        job.save_config_file parallelism.expert_parallel_comm_backend mx.recipe_name
        mx.mxfp8_dim1_cast_kernel_choice quantize.linear.mx.recipe_name
        quantize.linear.mx.mxfp8_dim1_cast_kernel_choice quantize.grouped_mm.mx.recipe_name
        fault_tolerance.process_group fault_tolerance.semi_sync_method""",
    _STRINGS: "mx.filter_fqns mx.moe_fqns_prototype quantize.linear.mx.filter_fqns",
}
# Keys of torchtitan's table [checkpoint] -> the value that is ignored, and what to do instead of another one.
_CHECKPOINT = {
    "interval_type": ("steps", "checkpoint.interval counts steps; leave it out"),
    "model_weights_only": (False, "only the last one may: set checkpoint.last_save_model_only instead"),
}
_OWN_PROGRAM = "import your module in a program of your own; leave it out"
_OWN_KEYS = "settings are those of docs/configuration.md; leave it out"
_REDUCED = "rank 0 writes what is reduced over all ranks; leave it out"
_NO_EXPERTS = "experts are neither cut by matrices nor computed in less than bfloat16 here; leave it out"
_SCALES = "scales are found from the tensor itself, 'dynamic'; leave it out"
_CLIPPED = "gradients are clipped by their global norm; leave it out"
_HIGH_PRECISION = "initial weights are read in float32, float64, bfloat16 or float16; leave it out"
_SAME_WEIGHTS = "initial weights are the same on every layout; leave it out"
_KEPT_PRODUCTS = "every second matrix product is kept, whatever its shape; leave it out"
_SCALING = "float8.scaling_type_input float8.scaling_type_weight float8.scaling_type_grad_output"
_COMPILED_AUTOGRAD = "parallelism.enable_compiled_autograd experimental.enable_compiled_autograd"
_EXPERTS = "float8.moe_fqns_prototype quantize.grouped_mm.float8.fqns quantize.grouped_mm.mx.fqns"
_PRODUCTS = "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns"

ABSENT: dict[str, Absent] = {
    **{key: Absent(kind, None) for kind, keys in _IGNORED.items() for key in keys.split()},
    **_refused("model.print_after_conversion training.gc_debug activation_checkpoint.debug", False),
    **_refused("activation_checkpoint.visualize_memory_budget_pareto", False),
    **_refused("memory_estimation.enabled memory_estimation.enable", False),
    **_refused("activation_checkpoint.determinism_check", "default"),
    **_refused("job.custom_config_module experimental.custom_args_module", "", instead=_OWN_KEYS),
    **_refused("experimental.custom_import experimental.custom_model_path", "", instead=_OWN_PROGRAM),
    **_refused("metrics.save_for_all_ranks", False, instead=_REDUCED),
    **_refused("metrics.rank_0_only", True, instead=_REDUCED),
    **_refused("optimizer.early_step_in_backward", False, instead=_CLIPPED),
    **_refused(_COMPILED_AUTOGRAD, False, instead="use compile.enable alone"),
    **_refused("parallelism.expert_tensor_parallel_degree", 1, instead=_NO_EXPERTS),
    **_refused(_EXPERTS, (), instead=_NO_EXPERTS, needs="float8.enable"),
    **_refused("training.checkpoint_interval_type", "steps", instead=_CHECKPOINT["interval_type"][1]),
    **_refused("training.checkpoint_folder", "", instead="set checkpoint.enable and checkpoint.folder"),
    **{
        key: absent
        for name, (off, instead) in _CHECKPOINT.items()
        for key, absent in _refused(f"checkpoint.{name}", off, instead=instead, needs="checkpoint.enable").items()
    },
    **_refused("checkpoint.initial_load_in_hf_quantized", False, instead=_HIGH_PRECISION),
    **_refused("checkpoint.create_seed_checkpoint", False, instead=_SAME_WEIGHTS),
    **_refused(_PRODUCTS, (), ("moe.router.gate",), instead=_KEPT_PRODUCTS),
    **_refused(_SCALING, "dynamic", instead=_SCALES, needs="float8.enable"),
    **_refused("comm.mode", "default", instead="use --check-config for a run that starts nothing"),
    **_refused("comm.save_traces_file_prefix", "rank_", instead="files are named rank_R; leave it out"),
    **_refused("fault_tolerance.enable", False, instead="use checkpoint.enable, and start the same command again"),
    **_refused("liger_kernel.enable_fused_linear_cross_entropy", False, instead="use compile.enable with 'loss'"),
    **_refused("validation.steps", -1, instead="use validation.sequences", needs="validation.enable"),
    **_refused("debug.deterministic_warn_only", False, instead="use debug.deterministic alone"),
}
