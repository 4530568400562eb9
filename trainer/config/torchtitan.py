"""torchtitan's settings that have another name here, or none: what becomes of each, as tables.

They are the keys of its TOML files from 2024 to 2026, as far as a Llama can meet them. docs/torchtitan.md shows them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from trainer.config.errors import ConfigError, did_you_mean
from trainer.config.schema import Parallelism


@dataclass(frozen=True)
class Spelling:
    """An older key of a setting: today's key, what changes in words, the type of the older value, and its conversion.

    kind: None stands for the type of today's key.
    """

    key: str
    words: str = ""
    kind: Any = None
    convert: Callable[[Any], object] = lambda value: value


@dataclass(frozen=True)
class Absent:
    """A setting of something that this program has not.

    off: values that ask for nothing; None: no value does. instead: what to do where a value asks for something;
    needs: today's switch without which no value does.
    """

    kind: Any
    off: tuple[object, ...] | None
    instead: str = ""
    needs: str = ""


def _rotation(key: str) -> Callable[[str], str]:
    """How K/V travel in a ring: from neighbour to neighbour ("alltoall"), or gathered at once ("allgather")."""

    def convert(how: str) -> str:
        if how in ("alltoall", "allgather"):
            return {"alltoall": "ring", "allgather": "all_gather"}[how]
        raise ConfigError(
            f"{key} = {how!r} has no counterpart here; use parallelism.context_parallel_method = 'ring' or "
            f"'all_gather' (once 'alltoall' and 'allgather')"
        )

    return convert


def _schedule(name: str) -> str:
    """A schedule of a pipeline, once in lower case and with underscores."""
    today = get_args(get_type_hints(Parallelism)["pipeline_parallel_schedule"])
    names = {choice.lower(): choice for choice in today} | {"flexibleinterleaved1f1b": "Interleaved1F1B"}
    if (plain := name.lower().replace("_", "")) in names:
        return names[plain]
    raise ConfigError(f"experimental.pipeline_parallel_schedule = {name!r} is no schedule{did_you_mean(name, today)}")


def _fp8_linear(how: str) -> bool:
    """How scales were found: from the tensor itself ("dynamic"), or not at all ("")."""
    if how in ("dynamic", ""):
        return how == "dynamic"
    raise ConfigError(f"training.fp8_linear = {how!r} has no counterpart here; use float8.enable (once 'dynamic')")


def _converters(names: Sequence[str]) -> bool:
    """Whether the linear modules are converted to float8; nothing else can be."""
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
    """Keys that have only moved to another table."""
    return {f"{table}.{key}": Spelling(f"{to}.{key}") for key in keys.split()}


OLDER: dict[str, Spelling] = {
    "job.print_args": Spelling("job.print_config"),
    "metrics.disable_color_printing": Spelling(
        "metrics.enable_color_printing", "inverted", bool, lambda disable: not disable
    ),
    "model.hf_assets_path": Spelling(
        "model.tokenizer_path", "a folder that holds `original/tokenizer.model` or `tokenizer.model`"
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
    "lr_scheduler.lr_min": Spelling("lr_scheduler.min_lr_factor"),
    **_moved("scheduler", "warmup_steps decay_ratio decay_type", "lr_scheduler"),
    "scheduler.lr_min": Spelling("lr_scheduler.min_lr_factor"),
    "training.batch_size": Spelling("training.local_batch_size"),
    "training.warmup_steps": Spelling("lr_scheduler.warmup_steps"),
    "training.compile": Spelling("compile.enable"),
    "training.fp8_linear": Spelling("float8.enable", '`"dynamic"` is true, `""` is false', str, _fp8_linear),
    "training.data_parallel_degree": Spelling("parallelism.data_parallel_shard_degree"),
    **_moved(
        "training",
        "data_parallel_replicate_degree data_parallel_shard_degree tensor_parallel_degree fsdp_reshard_after_forward "
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

# Values that a key of today had, or has elsewhere, and what they are here; None: the default.
OLDER_VALUES: dict[str, dict[str, str | None]] = {
    "model.norm_type": {"fused_rmsnorm": "rmsnorm", "compiled_rmsnorm": "rmsnorm"},
    "checkpoint.async_mode": {"async_with_pinned_mem": "async"},
    "parallelism.pipeline_parallel_schedule_csv": {"": None},
}

_SAVING = "checkpoint.enable"
_WHOLE_STATE = "every checkpoint holds the whole state, the weights among it; leave it out"
_NO_EXPERTS = "the models here have no experts; leave it out"
_ONE_LOADER = "data are read and tokenized by the process that trains; leave it out"
_OWN_CHECKPOINTS = "a run starts from its own checkpoints, in checkpoint.folder; leave it out"
_SCALES = "scales are found from the tensor itself, 'dynamic'; leave it out"


def _details(table: str, **kinds: Any) -> dict[str, Absent]:
    """Settings of something that is off, or that changes nothing here."""
    return {f"{table}.{name}": Absent(kind, None) for name, kind in kinds.items()}


_LOADER = {"num_workers": int, "persistent_workers": bool, "pin_memory": bool, "prefetch_factor": int}

ABSENT: dict[str, Absent] = {
    **_details("job", use_for_integration_test=bool, save_config_file=str),
    "job.custom_config_module": Absent(str, ("",), "settings are those of docs/configuration.md; leave it out"),
    "metrics.enable_wandb": Absent(bool, (False,), "use metrics.enable_tensorboard, or metrics.jsonl"),
    "metrics.save_for_all_ranks": Absent(bool, (False,), "rank 0 writes what is reduced over all ranks; leave it out"),
    "metrics.rank_0_only": Absent(bool, (True,), "rank 0 writes what is reduced over all ranks; leave it out"),
    "model.print_after_conversion": Absent(bool, (False,), "leave it out"),
    "optimizer.early_step_in_backward": Absent(
        bool, (False,), "gradients are clipped by their global norm; leave it out"
    ),
    "training.gc_debug": Absent(bool, (False,), "leave it out"),
    **{
        f"training.dataloader.{name}": Absent(kind, (0,) if kind is int else (False,), _ONE_LOADER)
        for name, kind in _LOADER.items()
    },
    "parallelism.enable_compiled_autograd": Absent(bool, (False,), "use compile.enable alone"),
    "parallelism.expert_parallel_degree": Absent(int, (1,), _NO_EXPERTS),
    "parallelism.expert_tensor_parallel_degree": Absent(int, (1,), _NO_EXPERTS),
    **_details("parallelism", expert_parallel_comm_backend=str, pipeline_parallel_expert_parallel_overlap=bool),
    "experimental.enable_compiled_autograd": Absent(bool, (False,), "use compile.enable alone"),
    "experimental.custom_import": Absent(str, ("",), "import your module in a program of your own; leave it out"),
    "experimental.custom_model_path": Absent(str, ("",), "import your module in a program of your own; leave it out"),
    "experimental.custom_args_module": Absent(str, ("",), "settings are those of docs/configuration.md; leave it out"),
    "checkpoint.interval_type": Absent(str, ("steps",), "checkpoint.interval counts steps; leave it out", _SAVING),
    "checkpoint.model_weights_only": Absent(bool, (False,), _WHOLE_STATE, _SAVING),
    "checkpoint.last_save_model_weights_only": Absent(bool, (False,), _WHOLE_STATE, _SAVING),
    "checkpoint.last_save_model_only": Absent(bool, (False,), _WHOLE_STATE, _SAVING),
    "checkpoint.last_save_in_hf": Absent(bool, (False,), _WHOLE_STATE, _SAVING),
    "checkpoint.export_dtype": Absent(str, ("float32",), "checkpoints keep training.dtype; leave it out", _SAVING),
    "checkpoint.initial_load_path": Absent(str, ("",), _OWN_CHECKPOINTS, _SAVING),
    **_details(
        "checkpoint",
        initial_load_model_only=bool,
        initial_load_model_weights_only=bool,
        initial_load_in_hf=bool,
        initial_load_in_hf_quantized=bool,
        enable_ft_dataloader_checkpoints=bool,
    ),
    "checkpoint.load_only": Absent(bool, (False,), "a checkpoint run saves; use a copy of its folder", _SAVING),
    "checkpoint.enable_first_step_checkpoint": Absent(
        bool, (False,), "try saving with checkpoint.interval = 1 and training.steps = 1", _SAVING
    ),
    "checkpoint.exclude_from_loading": Absent(_STRINGS, ((),), "the whole state is loaded; leave it out", _SAVING),
    "checkpoint.create_seed_checkpoint": Absent(
        bool, (False,), "initial weights are the same on every layout; leave it out"
    ),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Absent(
        _STRINGS, ((), ("moe.router.gate",)), "every second matrix product is kept, whatever its shape; leave it out"
    ),
    "activation_checkpoint.visualize_memory_budget_pareto": Absent(bool, (False,), "leave it out"),
    "activation_checkpoint.debug": Absent(bool, (False,), "leave it out"),
    "activation_checkpoint.determinism_check": Absent(str, ("default",), "leave it out"),
    **_details("activation_checkpoint", early_stop=bool, preserve_rng_state=bool),
    **{
        f"float8.scaling_type_{name}": Absent(str, ("dynamic",), _SCALES, "float8.enable")
        for name in ("input", "weight", "grad_output")
    },
    **_details("float8", force_recompute_fp8_weight_in_bwd=bool),
    "float8.moe_fqns_prototype": Absent(_STRINGS, ((),), _NO_EXPERTS),
    **_details(
        "mx", recipe_name=str, filter_fqns=_STRINGS, mxfp8_dim1_cast_kernel_choice=str, moe_fqns_prototype=_STRINGS
    ),
    **_details("quantize.linear.mx", recipe_name=str, filter_fqns=_STRINGS, mxfp8_dim1_cast_kernel_choice=str),
    "quantize.grouped_mm.float8.fqns": Absent(_STRINGS, ((),), _NO_EXPERTS),
    "quantize.grouped_mm.mx.fqns": Absent(_STRINGS, ((),), _NO_EXPERTS),
    **_details("quantize.grouped_mm.mx", recipe_name=str),
    "comm.mode": Absent(str, ("default",), "use --check-config for a run that starts nothing"),
    "comm.save_traces_file_prefix": Absent(str, ("rank_",), "files are named rank_R; leave it out"),
    "memory_estimation.enabled": Absent(bool, (False,), "leave it out"),
    "memory_estimation.enable": Absent(bool, (False,), "leave it out"),
    **_details("memory_estimation", disable_fake_mode=bool),
    "fault_tolerance.enable": Absent(bool, (False,), "use checkpoint.enable, and start the same command again"),
    **_details(
        "fault_tolerance",
        process_group=str,
        process_group_timeout_ms=int,
        replica_id=int,
        group_size=int,
        min_replica_size=int,
        semi_sync_method=str,
        sync_steps=int,
        should_quantize=bool,
        fragment_sync_delay=int,
        fragment_update_alpha=float,
    ),
    "liger_kernel.enable_fused_linear_cross_entropy": Absent(bool, (False,), "use compile.enable with 'loss'"),
    "validation.enabled": Absent(bool, (False,), "there is no validation during training; leave it out"),
    "validation.enable": Absent(bool, (False,), "there is no validation during training; leave it out"),
    **_details("validation", dataset=str, dataset_path=str, local_batch_size=int, seq_len=int, freq=int, steps=int),
    **_details("validation.dataloader", **_LOADER),
    "debug.deterministic_warn_only": Absent(bool, (False,), "use debug.deterministic alone"),
    **_details("debug", moe_force_load_balance=bool),
}
