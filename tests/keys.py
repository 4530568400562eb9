"""Table of how the effect of each key of the configuration is seen: one entry a key.

An entry is the name of a test that shows it, or `Seen`: two runs of the program that differ in the key, and what must
differ in the observations. `tests/distributed/test_keys.py` runs them and looks for keys that are missing here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Observed:
    """Observations of one run of the program on one rank."""

    code: int = 0
    out: str = ""
    files: list[str] = field(default_factory=list)
    """Paths below the dump folder."""
    losses: list[float] = field(default_factory=list)
    """Losses of the logged steps; `lrs` and `logged` have their learning rates and numbers."""
    lrs: list[float] = field(default_factory=list)
    logged: list[int] = field(default_factory=list)
    parameters: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Name -> elements on this rank, data type."""
    initial: float = 0.0
    """Sum of the absolute values of the weights, before the first step; `final` after the last."""
    final: float = 0.0
    clipped: float = 0.0
    """Norm of the gradient that the optimizer got in the first step."""
    optimizer: tuple[bool, bool] = (False, False)
    """Whether it works by lists of parameters, and whether it is fused."""
    moments: set[str] = field(default_factory=set)
    """Data types of the moments, at the end."""
    inputs: list[list[list[int]]] = field(default_factory=list)
    """Tokens that the embedding was given in the first step, each time."""
    compute: str = ""
    """Data type of the activations."""
    order: list[str] = field(default_factory=list)
    """First step: `F` a layer's forward, `B` its backward, `gather`, `reduce float32` (FSDP's collectives)."""
    policies: list[str] = field(default_factory=list)
    """Kinds of offload policy that FSDP was given."""
    logits: str = ""
    calls: dict[str, int] = field(default_factory=dict)
    """Collectives of our own in the first step."""
    deterministic: bool = False
    profiled: list[str] = field(default_factory=list)
    """What the profiler did in each step."""
    compiled: list[str] = field(default_factory=list)
    """`function backend` of each call of torch.compile."""
    float8: int = 0
    """Modules that multiply in float8."""
    timeouts: list[float] = field(default_factory=list)
    """Seconds: of the job's group in the first step, of a checkpoint's group, of the job's group at the end."""
    watching: bool = False
    remembered: str = ""
    """Number of collectives that the flight recorder keeps."""


@dataclass(frozen=True)
class Seen:
    """Runs with the arguments `off` and `on`, on `ranks` ranks, whose observations must satisfy `differs`.

    fail: the fault of the program in its first step.
    """

    on: str
    differs: Callable[[Observed, Observed], bool]
    off: str = ""
    ranks: int = 1
    fail: str = ""


def _contains(attribute: str, part: str) -> Callable[[Observed, Observed], bool]:
    """`part` is in a text, or in an item of a list, of the second run only."""

    def differs(off: Observed, on: Observed) -> bool:
        return part not in str(getattr(off, attribute)) and part in str(getattr(on, attribute))

    return differs


def _other(attribute: str) -> Callable[[Observed, Observed], bool]:
    return lambda off, on: getattr(off, attribute) != getattr(on, attribute)


def _becomes(attribute: str, off_value: Any, on_value: Any) -> Callable[[Observed, Observed], bool]:
    return lambda off, on: (getattr(off, attribute), getattr(on, attribute)) == (off_value, on_value)


def _layers(observed: Observed) -> set[str]:
    return {name.split(".")[1] for name in observed.parameters if name.startswith("layers.")}


def _elements(observed: Observed) -> int:
    return sum(number for number, _ in observed.parameters.values())


def _recorded(observed: Observed) -> list[int]:
    """Steps that a trace has."""
    return [step for step, action in enumerate(observed.profiled, 1) if action.startswith("RECORD")]


def _forwards_first(observed: Observed) -> int:
    """Forwards of layers before the first backward."""
    return observed.order[: observed.order.index("B")].count("F")


def _gathers_of_the_backward(observed: Observed) -> int:
    return observed.order[observed.order.index("B") - 1 :].count("gather") if "B" in observed.order else -1


_CP2, _TP2 = "--parallelism.context_parallel_degree=2", "--parallelism.tensor_parallel_degree=2"
_PP = "--parallelism.pipeline_parallel_"
_PP2 = f"--model.flavor=tiny4 --training.local_batch_size=4 {_PP}degree=2"
_SAVE = "--checkpoint.enable"
_TRACE = "--profiling.enable_profiling --profiling.profile_freq=3 --profiling.profiler_warmup=2"
_FLOAT8 = "--float8.enable --float8.emulate"
_COMPILE = "--compile.enable --compile.backend=eager"
_DECAY = "--lr_scheduler.warmup_steps=0"

# One run for several keys; each key shows in another place.
_MANY = (
    "--job.description=what-it-is-for --metrics.enable_tensorboard "
    "--optimizer.implementation=fused --training.deterministic --checkpoint.enable "
    "--checkpoint.folder=c --checkpoint.interval=2 --comm.init_timeout_seconds=77 --comm.train_timeout_seconds=88 "
    "--comm.checkpoint_timeout_seconds=99 --comm.trace_buf_size=123"
)
_LORA = "tests/distributed/test_lora.py"
_PREFERENCES = "tests/distributed/test_preferences.py"
_CHECKPOINTS = "tests/distributed/test_checkpoint_settings.py"
_SKIPPED = "tests/distributed/test_skipped_steps.py"
_VALIDATION = "tests/distributed/test_validation.py"
_CHUNKS = "tests/distributed/test_sequence_chunks.py"
_OFFLOAD = "tests/distributed/test_offload.py"
_SHAPE = "--training.local_batch_size=4 --training.seq_len=24 --training.global_batch_size=12"
_TRACE_TWO = f"{_TRACE} --profiling.profiler_warmup=1 --profiling.profiler_active=2"
_TRACE_OFTEN = f"{_TRACE} --profiling.profile_freq=2 --profiling.profiler_warmup=0"
_GPIPE = f"{_PP2} {_PP}schedule=GPipe {_PP}module_fqns tok_embeddings,layers.0,layers.1,layers.2 layers.3,norm,output"

EFFECTS: dict[str, str | Seen] = {
    # ---- job
    "job.config_file": "tests/unit/test_config_loader.py::test_command_line_over_file_over_base_over_defaults",
    "job.dump_folder": Seen("", lambda _, on: {"config.toml", "metrics.jsonl"} <= set(on.files)),
    "job.description": Seen(_MANY, _contains("out", "what-it-is-for")),
    "job.imports": "tests/unit/test_extensions.py::test_a_model_and_a_table_come_from_the_folder_of_the_command",
    "job.device": "tests/unit/test_devices.py::test_the_device_that_is_asked_for",
    "job.stop_signals": "tests/unit/test_stop.py::test_signals_of_the_key_count_and_no_others",
    "job.max_minutes": Seen("--job.max_minutes=1e-6", _becomes("logged", [1, 2, 3], [1])),
    # ---- profiling
    "profiling.enable_profiling": Seen(_TRACE, _contains("files", "profile_trace/iteration_3/rank0_trace.json")),
    "profiling.profile_freq": Seen(_TRACE_OFTEN, _contains("files", "iteration_2/"), _TRACE),
    "profiling.profiler_active": Seen(
        _TRACE_TWO, lambda off, on: (_recorded(off), _recorded(on)) == ([3], [2, 3]), _TRACE
    ),
    "profiling.profiler_warmup": Seen(
        _TRACE_OFTEN, lambda off, on: (off.profiled.count("WARMUP"), on.profiled.count("WARMUP")) == (2, 0), _TRACE
    ),
    "profiling.enable_memory_snapshot": "tests/distributed/test_profiling.py::test_memory_snapshots_need_a_gpu",
    # ---- metrics
    "metrics.log_freq": Seen("--metrics.log_freq=3", _becomes("logged", [1, 2, 3], [1, 3])),
    "metrics.enable_tensorboard": Seen(_MANY, _contains("files", "events.out.tfevents")),
    "metrics.enable_wandb": "tests/unit/test_components.py::test_weights_and_biases_offline",
    "metrics.log_update_norms": "tests/distributed/test_update_norms.py::test_every_layout_logs_what_one_process_logs",
    # ---- model
    "model.name": "tests/unit/test_job.py::test_what_cannot_work_is_refused_in_one_sentence",
    "model.path": "tests/distributed/test_hugging_face.py::test_a_model_trains_here_as_there",
    "model.flavor": Seen("--model.flavor=tiny4", lambda off, on: len(_layers(on)) == 2 * len(_layers(off))),
    "model.norm_type": Seen(
        "--model.norm_type=np_layernorm", lambda off, on: "norm.weight" in {*off.parameters} - {*on.parameters}
    ),
    "model.tokenizer_path": Seen(
        "--model.tokenizer_path={data}/tokenizer.model", lambda off, on: _elements(on) < _elements(off)
    ),
    "model.chat_template": "tests/unit/test_chat_jobs.py::test_a_template_of_your_own",
    "chat.arguments": (
        "tests/unit/test_chat.py::test_arguments_of_the_template_come_from_the_configuration_and_the_line"
    ),
    "chat.date": "tests/unit/test_chat.py::test_arguments_of_the_template_come_from_the_configuration_and_the_line",
    "chat.answers": "tests/unit/test_chat.py::test_some_answers_alone_are_learnt",
    "chat.too_long": (
        "tests/unit/test_best_fit.py::test_a_long_conversation_is_cut_behind_an_answer_or_left_out_and_counted"
    ),
    "model.rope_theta": Seen("--model.rope_theta=100", _other("losses")),
    "model.router_aux_loss_coef": (
        "tests/distributed/test_expert_balance.py::test_the_losses_and_the_biases_change_what_is_learnt"
    ),
    "model.router_aux_loss_load": (
        "tests/distributed/test_expert_balance.py::test_the_losses_and_the_biases_change_what_is_learnt"
    ),
    "model.router_bias_update_rate": (
        "tests/distributed/test_expert_balance.py::test_the_losses_and_the_biases_change_what_is_learnt"
    ),
    "model.mtp_layers": Seen("--model.mtp_layers=1", _contains("parameters", "mtp_norms.2.weight")),
    "model.rope_scaling": Seen("--model.rope_scaling=8", _other("final")),
    "model.rope_scaling_type": Seen(
        "--model.rope_scaling=8 --model.rope_scaling_type=linear", _other("losses"), "--model.rope_scaling=8"
    ),
    "model.rope_original_seq_len": Seen(
        "--model.rope_scaling=8 --model.rope_original_seq_len=16", _other("losses"), "--model.rope_scaling=8"
    ),
    "model.sliding_window": Seen("--model.sliding_window=3", _other("losses")),
    "model.sliding_window_every": Seen(
        "--model.sliding_window=3 --model.sliding_window_every=2", _other("losses"), "--model.sliding_window=3"
    ),
    "model.attention_sinks": Seen("--model.attention_sinks", _contains("parameters", "attention.sinks.weight")),
    "model.short_conv_kernel": Seen("--model.short_conv_kernel=4", _contains("parameters", "short_conv.q.weight")),
    # ---- optimizer
    "optimizer.name": Seen("--optimizer.name=Adam", _other("final")),
    "optimizer.lr": Seen("--optimizer.lr=2e-3", lambda off, on: on.lrs == [2 * lr for lr in off.lrs]),
    "optimizer.beta1": Seen("--optimizer.beta1=0.5", _other("final")),
    "optimizer.beta2": Seen("--optimizer.beta2=0.5", _other("final")),
    "optimizer.eps": Seen("--optimizer.eps=1e-2", _other("final")),
    "optimizer.weight_decay": Seen("--optimizer.weight_decay=10", lambda off, on: on.final < off.final),
    "optimizer.state_dtype": Seen(
        "--optimizer.state_dtype=bfloat16", lambda off, on: (off.moments, on.moments) == ({"float32"}, {"bfloat16"})
    ),
    "optimizer.rounding": Seen(
        "--optimizer.state_dtype=bfloat16 --optimizer.rounding=nearest",
        lambda off, on: off.losses[:2] == on.losses[:2] and off.final != on.final,
        "--optimizer.state_dtype=bfloat16",
    ),
    "optimizer.implementation": Seen(_MANY, _becomes("optimizer", (True, False), (False, True))),
    "optimizer.qk_clip": "tests/distributed/test_qk_clip.py::test_no_logit_stays_above_the_bound",
    "optimizer.groups": "tests/distributed/test_muon.py::test_rates_and_decays_by_name",
    # ---- muon
    "muon.lr": Seen("--optimizer.name=Muon --muon.lr=0.1", _other("final"), "--optimizer.name=Muon"),
    "muon.lr_rule": Seen("--optimizer.name=Muon --muon.lr_rule=original", _other("final"), "--optimizer.name=Muon"),
    "muon.weight_decay": Seen(
        "--optimizer.name=Muon --muon.weight_decay=10", lambda off, on: on.final < off.final, "--optimizer.name=Muon"
    ),
    "muon.momentum": Seen("--optimizer.name=Muon --muon.momentum=0.5", _other("final"), "--optimizer.name=Muon"),
    "muon.nesterov": Seen("--optimizer.name=Muon --muon.nesterov=false", _other("final"), "--optimizer.name=Muon"),
    "muon.per_head": Seen("--optimizer.name=Muon --muon.per_head", _other("final"), "--optimizer.name=Muon"),
    "muon.dtype": Seen("--optimizer.name=Muon --muon.dtype=bfloat16", _other("final"), "--optimizer.name=Muon"),
    # ---- lr_scheduler
    "lr_scheduler.warmup_steps": Seen("--lr_scheduler.warmup_steps=3", lambda off, on: on.lrs[0] < off.lrs[0]),
    "lr_scheduler.total_steps": Seen(
        f"{_DECAY} --lr_scheduler.total_steps=30", lambda off, on: on.lrs[2] > 0.9e-3 > off.lrs[2], _DECAY
    ),
    "lr_scheduler.decay_ratio": Seen(
        f"{_DECAY} --lr_scheduler.decay_ratio=0", lambda off, on: on.lrs[2] == 1e-3 > off.lrs[2], _DECAY
    ),
    "lr_scheduler.decay_type": Seen(
        f"{_DECAY} --lr_scheduler.decay_type=cosine", lambda off, on: on.lrs[1] > off.lrs[1], _DECAY
    ),
    "lr_scheduler.min_lr_factor": Seen(
        f"{_DECAY} --lr_scheduler.min_lr_factor=0.5", lambda off, on: on.lrs[2] > 0.6e-3 > off.lrs[2], _DECAY
    ),
    "lr_scheduler.restart_step": "tests/distributed/test_muon.py::test_a_finished_run_goes_on_in_a_new_schedule",
    # ---- training
    "training.dataset": Seen(
        "--training.dataset=jsonl --training.dataset_path={data}/lines.jsonl",
        _other("inputs"),
        "--training.dataset=text --training.dataset_path={data}/lines",
    ),
    "training.dataset_path": Seen("--training.dataset_path={data}/lines", _other("inputs")),
    "training.dataset_text_field": "tests/unit/test_data_jsonl.py::test_the_text_may_have_another_name",
    "training.on_bad_record": "tests/distributed/test_bad_data.py::test_a_damaged_document_stops_or_is_left_out",
    "training.local_batch_size": Seen(_SHAPE, lambda off, on: (len(off.inputs[0]), len(on.inputs[0])) == (2, 4)),
    "training.global_batch_size": Seen(_SHAPE, lambda off, on: (len(off.inputs), len(on.inputs)) == (1, 3)),
    "parallelism.domain_parallel_degrees": (
        "examples/fields/tests/test_parity.py::test_every_layout_trains_as_one_process"
    ),
    "training.seq_len": Seen(_SHAPE, lambda off, on: (len(off.inputs[0][0]), len(on.inputs[0][0])) == (16, 24)),
    "training.balance": "tests/distributed/test_balance.py::test_every_document_is_somewhere_once",
    "training.attention_mask": Seen(
        "--training.attention_mask=document --training.dataset_path={data}/lines",
        _other("losses"),
        "--training.dataset_path={data}/lines",
    ),
    "mixture.names": "tests/distributed/test_mixture.py::test_a_layout_records_what_one_process_does",
    "mixture.paths": "tests/distributed/test_mixture.py::test_a_layout_records_what_one_process_does",
    "mixture.weights": "tests/distributed/test_mixture.py::test_a_layout_records_what_one_process_does",
    "training.packing": Seen(
        "--training.packing=pad --training.dataset_path={data}/lines",
        _other("losses"),
        "--training.dataset_path={data}/lines",
    ),
    "training.max_norm": Seen(
        "--training.max_norm=0.25", lambda off, on: abs(on.clipped - 0.25) < 1e-3 < off.clipped - 0.25
    ),
    "training.on_nonfinite": f"{_SKIPPED}::test_a_step_that_is_not_finite_is_left_out_on_all_ranks",
    "training.early_update": "tests/distributed/test_early_update.py::test_the_update_is_that_of_the_ordinary_step",
    "training.max_skipped_steps": f"{_SKIPPED}::test_only_steps_in_a_row_count",
    "training.sequence_chunks": Seen(
        "--training.sequence_chunks=3",
        lambda off, on: [len(rows[0]) for rows in (*off.inputs, *on.inputs)] == [16, 6, 5, 5, 5, 6],
    ),
    "training.sequence_chunks_offload": f"{_CHUNKS}::test_rows_wait_on_the_host_if_asked",
    "training.z_loss": Seen(
        "--training.z_loss=0.1", lambda off, on: off.losses[0] == on.losses[0] and off.losses[1] != on.losses[1]
    ),
    "training.mtp_loss_weight": Seen(
        "--model.mtp_layers=1 --training.mtp_loss_weight=1",
        lambda off, on: off.losses[0] == on.losses[0] and off.losses[1] != on.losses[1],
        "--model.mtp_layers=1",
    ),
    "training.loss_chunk_tokens": Seen("--training.loss_chunk_tokens=7", _becomes("logits", "4352", "")),
    "training.steps": Seen("--training.steps=4", _becomes("logged", [1, 2, 3], [1, 2, 3, 4])),
    "training.dtype": Seen("--training.dtype=bfloat16", _contains("parameters", "bfloat16")),
    "training.mixed_precision_param": Seen(
        "--training.mixed_precision_param=bfloat16", _becomes("compute", "float32", "bfloat16")
    ),
    "training.mixed_precision_reduce": Seen(
        "--training.mixed_precision_reduce=bfloat16",
        lambda off, on: {"reduce float32"} == _reductions(off) and {"reduce bfloat16"} == _reductions(on),
        ranks=2,
    ),
    "training.enable_cpu_offload": Seen(
        "--training.enable_cpu_offload",
        lambda off, on: (
            (off.policies, off.optimizer) == ([], (True, False))
            and (set(on.policies), on.optimizer) == ({"CPUOffloadPolicy"}, (False, True))
        ),
    ),
    "training.seed": Seen("--training.seed=1", _other("initial")),
    "training.deterministic": Seen(_MANY, _becomes("deterministic", False, True)),
    "training.data_streams": Seen("--training.data_streams=4", _other("losses")),
    # ---- parallelism: who has what
    "parallelism.data_parallel_replicate_degree": Seen(
        "--parallelism.data_parallel_replicate_degree=2", lambda off, on: _elements(on) == 2 * _elements(off), ranks=2
    ),
    "parallelism.data_parallel_shard_degree": Seen(
        "--parallelism.data_parallel_shard_degree=2 --parallelism.data_parallel_replicate_degree=1",
        lambda off, on: 2 * _elements(on) == _elements(off),
        "--parallelism.data_parallel_shard_degree=1 --parallelism.data_parallel_replicate_degree=2",
        ranks=2,
    ),
    "parallelism.tensor_parallel_degree": Seen(
        _TP2, lambda off, on: on.parameters["norm.weight"][0] == 2 * off.parameters["norm.weight"][0], ranks=2
    ),
    "parallelism.context_parallel_degree": Seen(
        _CP2, lambda off, on: (len(off.inputs[0][0]), len(on.inputs[0][0])) == (16, 8), ranks=2
    ),
    "parallelism.expert_parallel_degree": (
        "tests/distributed/test_experts.py::test_the_host_reads_one_table_of_counts_a_layer_and_forward"
    ),
    "parallelism.pipeline_parallel_degree": Seen(
        f"{_PP}degree=2", lambda off, on: (_layers(off), _layers(on)) == ({"0", "1"}, {"0"}), ranks=2
    ),
    # ---- parallelism: context parallel
    "parallelism.context_parallel_method": Seen(
        f"{_CP2} --parallelism.context_parallel_method=all_to_all", _other("calls"), _CP2, ranks=2
    ),
    "parallelism.context_parallel_hybrid_degrees": (
        "tests/unit/test_job.py::test_the_degrees_of_a_hybrid_are_resolved"
    ),
    "parallelism.context_parallel_load_balancer": Seen(
        f"{_CP2} --parallelism.context_parallel_load_balancer=contiguous", _other("inputs"), _CP2, ranks=2
    ),
    "parallelism.context_parallel_heads_per_pass": Seen(
        f"{_CP2} --parallelism.context_parallel_method=all_gather --parallelism.context_parallel_heads_per_pass=2",
        lambda off, on: sum(on.calls.values()) > sum(off.calls.values()),
        f"{_CP2} --parallelism.context_parallel_method=all_gather",
        ranks=2,
    ),
    "parallelism.context_parallel_query_heads_per_pass": Seen(
        f"{_CP2} --parallelism.context_parallel_method=all_to_all "
        "--parallelism.context_parallel_query_heads_per_pass=1",
        lambda off, on: sum(on.calls.values()) > sum(off.calls.values()),
        f"{_CP2} --parallelism.context_parallel_method=all_to_all",
        ranks=2,
    ),
    "parallelism.context_parallel_gradient_dtype": (
        "tests/distributed/test_bfloat16.py::test_gradients_of_keys_in_bfloat16"
    ),
    "parallelism.context_parallel_keep_exchanged": Seen(
        f"{_CP2} --parallelism.context_parallel_method=all_to_all --parallelism.context_parallel_keep_exchanged",
        lambda off, on: "qkv_dout" in off.calls and "dout" in on.calls,
        f"{_CP2} --parallelism.context_parallel_method=all_to_all",
        ranks=2,
    ),
    "parallelism.context_parallel_kernel": Seen(
        "--training.attention_mask=document --parallelism.context_parallel_kernel=math",
        _other("final"),
        "--training.attention_mask=document",
    ),
    # ---- parallelism: pipelines
    f"{_PP[2:]}schedule": Seen(
        _GPIPE, lambda off, on: (_forwards_first(off), _forwards_first(on)) == (2 * 2, 4 * 3), _PP2, ranks=2
    ),
    f"{_PP[2:]}microbatch_size": Seen(
        f"{_PP2} {_PP}microbatch_size=2",
        lambda off, on: (len(off.inputs), len(on.inputs)) == (4, 2),
        _PP2,
        ranks=2,
    ),
    f"{_PP[2:]}layers_per_stage": Seen(
        f"{_PP2} {_PP}schedule=LoopedBFS {_PP}layers_per_stage=3",
        lambda off, on: (_layers(off), _layers(on)) == ({"0", "2"}, {"0", "1"}),
        f"{_PP2} {_PP}schedule=LoopedBFS",
        ranks=2,
    ),
    f"{_PP[2:]}module_fqns": Seen(
        f"{_PP2} {_PP}module_fqns tok_embeddings layers.0,layers.1,layers.2,layers.3,norm,output",
        lambda off, on: (_layers(off), _layers(on)) == ({"0", "1"}, set()),
        _PP2,
        ranks=2,
    ),
    # ---- parallelism: FSDP and TP
    "parallelism.fsdp_reshard_after_forward": Seen(
        "--parallelism.fsdp_reshard_after_forward=never",
        lambda off, on: _gathers_of_the_backward(off) >= 2 and _gathers_of_the_backward(on) == 0,
        ranks=2,
    ),
    "parallelism.fsdp_forward_prefetch": (
        "tests/distributed/test_collectives.py::test_prefetching_gathers_layers_ahead"
    ),
    "parallelism.fsdp_zero_copy": (
        "tests/distributed/test_collectives.py::test_buffers_lie_in_the_memory_of_a_group_that_has_some"
    ),
    "parallelism.enable_async_tensor_parallel": (
        "tests/distributed/test_compile.py::test_the_compiler_is_told_of_overlap_split_backwards_and_budgets"
    ),
    "parallelism.disable_loss_parallel": Seen(
        f"{_TP2} --parallelism.disable_loss_parallel",
        _becomes("logits", "a shard of 2176", "4352"),
        _TP2,
        ranks=2,
    ),
    # ---- checkpoint
    "checkpoint.enable": Seen(_SAVE, _contains("files", "checkpoint/step-3/")),
    "checkpoint.folder": Seen(_MANY, _contains("files", "'c/step-3/"), _SAVE),
    "checkpoint.interval": Seen(_MANY, _contains("files", "/step-2/"), _SAVE),
    "checkpoint.keep_latest_k": Seen(
        f"{_SAVE} --checkpoint.interval=1 --checkpoint.keep_latest_k=2",
        lambda off, on: (
            "/step-1/" in str(off.files) and "/step-1/" not in str(on.files) and "/step-2/" in str(on.files)
        ),
        f"{_SAVE} --checkpoint.interval=1",
    ),
    "checkpoint.enable_first_step_checkpoint": Seen(
        f"{_SAVE} --checkpoint.enable_first_step_checkpoint", _contains("files", "checkpoint/step-1/state.json"), _SAVE
    ),
    "checkpoint.interval_seconds": f"{_CHECKPOINTS}::test_one_rank_whose_time_is_up_makes_all_save",
    "checkpoint.keep_every": "tests/unit/test_checkpoint_folder.py::test_every_nth_step_stays",
    "checkpoint.load_only": f"{_CHECKPOINTS}::test_load_only_resumes_and_writes_no_checkpoint",
    "checkpoint.initial_load_model_only": f"{_CHECKPOINTS}::test_a_run_continues_another_one_and_then_itself",
    "checkpoint.exclude_from_loading": f"{_CHECKPOINTS}::test_what_is_excluded_is_not_loaded_and_all_else_is",
    "checkpoint.load_step": "tests/integration/test_resume.py::test_load_step_goes_back",
    "checkpoint.async_mode": Seen(
        f"{_SAVE} --checkpoint.interval=1 --checkpoint.async_mode=async",
        _contains("out", "step 1 is copied for its checkpoint"),
        f"{_SAVE} --checkpoint.interval=1",
    ),
    "checkpoint.initial_load_path": "tests/distributed/test_hugging_face.py::test_a_model_trains_here_as_there",
    "checkpoint.last_save_model_only": f"{_CHECKPOINTS}::test_the_last_save_may_be_of_weights_alone",
    "checkpoint.last_save_in_hf": Seen(
        f"{_SAVE} --checkpoint.last_save_in_hf", _contains("files", "checkpoint/step-3-hf/model.safetensors"), _SAVE
    ),
    "checkpoint.export_dtype": "tests/distributed/test_hugging_face.py::test_a_model_trains_here_as_there",
    "checkpoint.stop_timeout_seconds": "tests/unit/test_stop.py::test_the_timeout_and_a_second_signal_end_at_once",
    # ---- validation
    "validation.enable": f"{_VALIDATION}::test_lines_of_validation",
    "validation.freq": f"{_VALIDATION}::test_lines_of_validation",
    "validation.dataset": f"{_VALIDATION}::test_the_loss_is_the_plain_mean",
    "validation.dataset_path": f"{_VALIDATION}::test_data_of_less_than_a_sequence_are_refused_on_every_rank",
    "validation.sequences": f"{_VALIDATION}::test_ranks_share_the_sequences_of_one_pass",
    "validation.seq_len": f"{_VALIDATION}::test_the_loss_is_that_of_one_process",
    "validation.local_batch_size": f"{_VALIDATION}::test_rows_of_a_forward",
    "validation.keep_best": f"{_VALIDATION}::test_the_best_checkpoint_is_saved_and_kept",
    # ---- lora
    "lora.rank": f"{_LORA}::test_frozen_weights_stay",
    "lora.alpha": f"{_LORA}::test_adapters_train_here_as_in_peft",
    "lora.quantize": "tests/distributed/test_quantized.py::test_adapters_train_as_over_the_dequantised_weights",
    "lora.dropout": f"{_LORA}::test_layouts_drop_the_same_inputs",
    "lora.whole": f"{_LORA}::test_layouts_train_embedding_and_output_beside_adapters",
    "lora.modules": f"{_LORA}::test_adapters_train_here_as_in_peft",
    # ---- dpo
    "dpo.beta": f"{_PREFERENCES}::test_losses_and_gradients_are_those_of_the_formula",
    "dpo.loss": f"{_PREFERENCES}::test_losses_and_gradients_are_those_of_the_formula",
    "dpo.label_smoothing": f"{_PREFERENCES}::test_losses_and_gradients_are_those_of_the_formula",
    "dpo.reference": f"{_PREFERENCES}::test_a_resumed_run_has_the_reference_of_its_start",
    # ---- activation_checkpoint
    "activation_checkpoint.mode": Seen(
        "--activation_checkpoint.mode=full", lambda off, on: (off.order.count("F"), on.order.count("F")) == (2, 4)
    ),
    "activation_checkpoint.selective_ac_option": Seen(
        "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=2",
        lambda off, on: (off.order.count("F"), on.order.count("F")) == (4, 3),
        "--activation_checkpoint.mode=selective",
    ),
    "activation_checkpoint.memory_budget": (
        "tests/distributed/test_compile.py::test_a_smaller_budget_keeps_less_and_attention_is_not_communicated_again"
    ),
    "activation_checkpoint.group": "tests/distributed/test_groups.py::test_memory_and_work_are_those_of_the_formula",
    "activation_checkpoint.offload": f"{_OFFLOAD}::test_results_of_attention_leave_the_device_with_the_inputs",
    "activation_checkpoint.offload_keep_last": f"{_OFFLOAD}::test_a_fraction_of_the_layers_and_the_last_ones",
    "activation_checkpoint.offload_fraction": f"{_OFFLOAD}::test_a_fraction_of_the_layers_and_the_last_ones",
    "activation_checkpoint.mlp_chunk_tokens": (
        "tests/distributed/test_tiles.py::test_inner_activations_do_not_grow_with_the_sequence"
    ),
    # ---- compile
    "compile.enable": Seen(_COMPILE, _becomes("compiled", [], ["row_losses eager"] + ["forward eager"] * 2)),
    "compile.components": Seen(
        f"{_COMPILE} --compile.components model", _contains("compiled", "['forward eager', 'forward eager']"), _COMPILE
    ),
    "compile.backend": Seen(
        "--compile.enable --compile.backend=aot_eager", _contains("compiled", "aot_eager"), _COMPILE
    ),
    # ---- float8
    "float8.enable": Seen(_FLOAT8, _becomes("float8", 0, 14)),
    "float8.recipe_name": Seen(f"{_FLOAT8} --float8.recipe_name=rowwise", _other("losses"), _FLOAT8),
    "float8.enable_fsdp_float8_all_gather": (
        "tests/distributed/test_float8.py::test_shards_are_gathered_in_float8_and_scales_in_one_reduction"
    ),
    "float8.filter_fqns": Seen(f"{_FLOAT8} --float8.filter_fqns output wk", _becomes("float8", 14, 12), _FLOAT8),
    "float8.emulate": Seen(_FLOAT8, _becomes("code", 2, 0), "--float8.enable"),
    # ---- comm
    "comm.init_timeout_seconds": Seen(_MANY, lambda off, on: (off.timeouts[0], on.timeouts[0]) == (300, 77)),
    "comm.train_timeout_seconds": Seen(_MANY, lambda off, on: (off.timeouts[-1], on.timeouts[-1]) == (100, 88)),
    "comm.checkpoint_timeout_seconds": Seen(
        _MANY, lambda off, on: (off.timeouts[1], on.timeouts[1]) == (1800, 99), _SAVE
    ),
    "comm.check_consistency": Seen(
        f"{_CP2} --comm.check_consistency",
        lambda off, on: sum(on.calls.values()) > sum(off.calls.values()),
        _CP2,
        ranks=2,
    ),
    "comm.trace_buf_size": Seen(_MANY, _becomes("remembered", "2000", "123")),
}


def _reductions(observed: Observed) -> set[str]:
    return {event for event in observed.order if event.startswith("reduce")}
