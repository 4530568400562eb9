"""Table of the keys that have no effect in some run: the settings, and the words of the line or of the refusal."""

from trainer.config.keys import keys_of
from trainer.config.schema import JobConfig

CONDITIONAL = {key for key, known in keys_of(JobConfig).items() if known.when}
# Always in effect, whatever the other settings are; `test_every_key_is_one_or_the_other` asks for a decision.
ALWAYS = {
    *("job.config_file", "job.dump_folder", "job.description", "job.max_minutes"),
    *("job.device", "job.imports", "job.stop_signals"),
    *("profiling.enable_profiling", "profiling.enable_memory_snapshot"),
    *("metrics.log_freq", "metrics.enable_tensorboard", "metrics.enable_wandb"),
    "metrics.log_update_norms",
    *("model.path", "model.name", "model.flavor", "lr_scheduler.warmup_steps"),
    "lr_scheduler.restart_step",
    *("optimizer.name", "optimizer.lr", "optimizer.weight_decay"),
    *(key for key in keys_of(JobConfig) if key.startswith("training.") and key not in CONDITIONAL),
    *(
        key
        for key in keys_of(JobConfig)
        if key.startswith("parallelism.") and key.endswith("_parallel_degree") and key not in CONDITIONAL
    ),
    *("parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"),
    *("checkpoint.enable", "checkpoint.initial_load_path", "checkpoint.stop_timeout_seconds"),
    "activation_checkpoint.mode",
    *("compile.enable", "float8.enable"),
}

CP, PP = "--parallelism.context_parallel_", "--parallelism.pipeline_parallel_"
TP2, CP2 = "--parallelism.tensor_parallel_degree=2", f"{CP}degree=2"
FLOAT8, GATHER = "--float8.enable", "--float8.enable_fsdp_float8_all_gather"
TRACES, SNAPSHOTS = "--profiling.enable_profiling", "--profiling.enable_memory_snapshot"
AC = "--activation_checkpoint."
MUON = ["--optimizer.name=Muon"]
OF_MUON = {
    "lr": ["0.01"],
    "lr_rule": ["original"],
    "weight_decay": ["0"],
    "momentum": ["0.9"],
    "nesterov": ["false"],
    "per_head": [],
    "dtype": ["float32"],
}
SHORT = ("--training.steps=50", "--lr_scheduler.warmup_steps=60")

VALIDATING = ["--validation.enable", "--validation.dataset=text", f"--validation.dataset_path={__file__}"]
# key, its setting, ranks, what brings it into effect (more ranks where that does), and what the line says
TOLD = [
    ("profiling.profiler_active", ["2"], 1, [TRACES], "without profiling.enable_profiling"),
    ("profiling.profiler_warmup", ["2"], 1, [TRACES], "without profiling.enable_profiling"),
    ("profiling.profile_freq", ["50"], 1, [TRACES], "or profiling.enable_memory_snapshot"),
    ("profiling.profile_freq", ["50"], 1, [SNAPSHOTS], "or profiling.enable_memory_snapshot"),
    ("model.chat_template", ["none"], 1, None, "without training.dataset = 'chat' or 'preferences'"),
    ("chat.arguments", ["enable_thinking=false"], 1, None, "without training.dataset = 'chat' or 'preferences'"),
    ("chat.date", ["2026-01-31"], 1, None, "without training.dataset = 'chat' or 'preferences'"),
    ("chat.answers", ["last"], 1, None, "without training.dataset = 'chat' or 'preferences'"),
    ("chat.too_long", ["drop"], 1, None, "without training.dataset = 'chat'"),
    ("training.dataset_text_field", ["body"], 1, None, "without training.dataset = 'jsonl'"),
    ("model.sliding_window", ["2048"], 1, ["--training.seq_len=2049"], "training.seq_len = 2048 tokens"),
    ("lr_scheduler.decay_type", ["cosine"], 1, ["--lr_scheduler.decay_ratio=0.5"], "does not decay"),
    ("lr_scheduler.min_lr_factor", ["0.1"], 1, ["--lr_scheduler.decay_ratio=0.5"], "does not decay"),
    ("optimizer.rounding", ["nearest"], 1, ["--optimizer.state_dtype=bfloat16"], "where nothing is stored in bfloat16"),
    *((f"muon.{key}", value, 1, MUON, "with optimizer.name = 'AdamW'") for key, value in OF_MUON.items()),
    ("training.mtp_loss_weight", ["0.2"], 1, ["--model.mtp_layers=1"], "with model.mtp_layers = 0"),
    ("training.balance", ["step"], 1, 2, "on one data-parallel rank"),
    ("training.mixed_precision_reduce", ["bfloat16"], 1, 2, "where gradients are not reduced"),
    (f"{CP[2:]}method", ["all_gather"], 2, [CP2], "with parallelism.context_parallel_degree = 1"),
    (f"{CP[2:]}load_balancer", ["contiguous"], 2, [CP2], "with parallelism.context_parallel_degree = 1"),
    (
        f"{CP[2:]}heads_per_pass",
        ["1"],
        2,
        [CP2, f"{CP}method=all_gather"],
        "with parallelism.context_parallel_degree = 1",
    ),
    (f"{CP[2:]}gradient_dtype", ["bfloat16"], 2, [CP2], "with parallelism.context_parallel_degree = 1"),
    (
        f"{CP[2:]}query_heads_per_pass",
        ["1"],
        2,
        [CP2, f"{CP}method=all_to_all"],
        "with parallelism.context_parallel_degree = 1",
    ),
    (
        f"{CP[2:]}keep_exchanged",
        ["true"],
        2,
        [CP2, f"{CP}method=all_to_all"],
        "with parallelism.context_parallel_degree = 1",
    ),
    (f"{CP[2:]}hybrid_degrees", ["2", "2"], 4, [f"{CP}degree=4", f"{CP}method=hybrid"], "context_parallel_degree = 1"),
    (f"{CP[2:]}kernel", ["math"], 2, [CP2], "on plain causal attention"),
    (f"{CP[2:]}kernel", ["math"], 1, ["--training.attention_mask=document"], "on plain causal attention"),
    (f"{PP[2:]}schedule", ["GPipe"], 2, [f"{PP}degree=2"], "with parallelism.pipeline_parallel_degree = 1"),
    (f"{PP[2:]}microbatch_size", ["2"], 2, [f"{PP}degree=2"], "with parallelism.pipeline_parallel_degree = 1"),
    (f"{PP[2:]}layers_per_stage", ["3"], 2, [f"{PP}degree=2"], "with parallelism.pipeline_parallel_degree = 1"),
    (
        f"{PP[2:]}module_fqns",
        ["tok_embeddings,layers.0", "layers.1,layers.2,layers.3,norm,output"],
        2,
        [f"{PP}degree=2"],
        "with parallelism.pipeline_parallel_degree = 1",
    ),
    ("parallelism.fsdp_reshard_after_forward", ["never"], 1, 2, "where parameters are not sharded"),
    ("parallelism.fsdp_forward_prefetch", ["2"], 1, 2, "where parameters are not sharded"),
    ("parallelism.fsdp_zero_copy", [], 1, 2, "where parameters are not sharded"),
    ("parallelism.disable_loss_parallel", [], 2, [TP2], "with parallelism.tensor_parallel_degree = 1"),
    (
        "parallelism.enable_async_tensor_parallel",
        [],
        2,
        [TP2, "--compile.enable"],
        "with parallelism.tensor_parallel_degree = 1",
    ),
    ("training.max_skipped_steps", ["9"], 1, ["--training.on_nonfinite=skip"], "with training.on_nonfinite = 'stop'"),
    ("checkpoint.folder", ["x"], 1, ["--checkpoint.enable"], "without checkpoint.enable"),
    ("checkpoint.interval", ["10"], 1, ["--checkpoint.enable"], "without checkpoint.enable"),
    ("checkpoint.enable_first_step_checkpoint", [], 1, ["--checkpoint.enable"], "without checkpoint.enable"),
    ("checkpoint.interval_seconds", ["60"], 1, ["--checkpoint.enable"], "without checkpoint.enable"),
    (
        "checkpoint.keep_every",
        ["1000"],
        1,
        ["--checkpoint.enable", "--checkpoint.keep_latest_k=2"],
        "without checkpoint.enable",
    ),
    ("checkpoint.load_only", [], 1, None, "without checkpoint.enable"),
    ("checkpoint.keep_latest_k", ["2"], 1, ["--checkpoint.enable"], "without checkpoint.enable"),
    ("checkpoint.async_mode", ["async"], 1, ["--checkpoint.enable"], "without checkpoint.enable"),
    *(
        (f"validation.{name}", [value], 1, VALIDATING, "without validation.enable")
        for name, value in (("freq", "5"), ("sequences", "3"), ("seq_len", "64"), ("local_batch_size", "2"))
    ),
    ("validation.dataset", ["jsonl"], 1, None, "without validation.enable"),
    ("validation.dataset_path", ["x.jsonl"], 1, None, "without validation.enable"),
    ("validation.keep_best", ["true"], 1, [*VALIDATING, "--checkpoint.enable"], "without validation.enable"),
    ("lora.alpha", ["8"], 1, None, "without lora.rank"),
    ("lora.modules", ["wq"], 1, None, "without lora.rank"),
    ("lora.quantize", ["nf4"], 1, None, "without lora.rank"),
    ("lora.dropout", ["0.1"], 1, None, "without lora.rank"),
    ("lora.whole", ["output"], 1, None, "without lora.rank"),
    ("dpo.beta", ["0.2"], 1, None, "without training.dataset = 'preferences'"),
    ("dpo.loss", ["ipo"], 1, None, "without training.dataset = 'preferences'"),
    ("dpo.label_smoothing", ["0.1"], 1, None, "without training.dataset = 'preferences'"),
    ("dpo.reference", ["copy"], 1, None, "without training.dataset = 'preferences'"),
    ("checkpoint.last_save_in_hf", [], 1, ["--checkpoint.enable"], "without checkpoint.enable"),
    ("checkpoint.last_save_model_only", [], 1, ["--checkpoint.enable"], "without checkpoint.enable"),
    (
        "checkpoint.export_dtype",
        ["bfloat16"],
        1,
        ["--checkpoint.enable", "--checkpoint.last_save_in_hf"],
        "without checkpoint.enable",
    ),
    ("activation_checkpoint.selective_ac_option", ["2"], 1, [f"{AC}mode=selective"], "mode = 'none'"),
    (
        "activation_checkpoint.memory_budget",
        ["0.3"],
        1,
        [f"{AC}mode=memory_budget", "--compile.enable"],
        "mode = 'none'",
    ),
    (
        "training.sequence_chunks_offload",
        ["true"],
        1,
        ["--training.sequence_chunks=2"],
        "without training.sequence_chunks above 1",
    ),
    ("activation_checkpoint.group", ["2"], 1, [f"{AC}mode=full"], "mode = 'none'"),
    ("activation_checkpoint.offload", ["inputs"], 1, [f"{AC}mode=full"], "mode = 'none', which keeps all activations"),
    *(
        (f"activation_checkpoint.{key}", [value], 1, [f"{AC}mode=full", f"{AC}offload=inputs"], "offload = 'none'")
        for key, value in (("offload_keep_last", "1"), ("offload_fraction", "0.5"))
    ),
    ("compile.components", ["model"], 1, ["--compile.enable"], "without compile.enable"),
    ("compile.backend", ["eager"], 1, ["--compile.enable"], "without compile.enable"),
    ("float8.recipe_name", ["rowwise"], 1, [FLOAT8], "without float8.enable"),
    ("float8.filter_fqns", ["wk"], 1, [FLOAT8], "without float8.enable"),
    ("float8.emulate", [], 1, [FLOAT8], "without float8.enable"),
    (GATHER[2:], [], 2, [FLOAT8], "without float8.enable"),
    ("comm.init_timeout_seconds", ["60"], 1, 2, "on one rank"),
    ("comm.train_timeout_seconds", ["60"], 1, 2, "on one rank"),
    ("comm.checkpoint_timeout_seconds", ["60"], 2, ["--checkpoint.enable"], "without checkpoint.enable"),
    ("comm.trace_buf_size", ["10"], 1, 2, "on one rank"),
    ("comm.check_consistency", [], 2, [CP2], "with parallelism.context_parallel_degree = 1"),
]
# Settings that go before: those in which the key of TOLD has no effect.
BEFORE = {
    "training.balance": ["--training.attention_mask=document"],
    "lr_scheduler.decay_type": ["--lr_scheduler.decay_ratio=0"],
    "lr_scheduler.min_lr_factor": ["--lr_scheduler.decay_ratio=0"],
}
# Told for another reason: arguments, ranks, what the lines say.
MORE = [
    (
        ["--model.rope_scaling=4", "--model.rope_scaling_type=linear", "--model.rope_original_seq_len=64"],
        1,
        ["rope_original_seq_len = 64 has no effect with model.rope_scaling_type = 'linear', which"],
    ),
    (["--model.name=mistral", "--training.seq_len=256", f"{CP}kernel=math"], 1, []),  # its window needs a plan
    (
        ["--model.sliding_window=4096", "--model.sliding_window_every=2"],
        1,
        ["sliding_window = 4096, model.sliding_window_e"],
    ),
    (
        [*SHORT, "--lr_scheduler.decay_type=cosine", "--lr_scheduler.total_steps=90"],
        1,
        ["total_steps = 90, lr_scheduler.decay_type = 'cosine' have no effect because all"],
    ),
    (
        [*SHORT, "--lr_scheduler.decay_ratio=0.2"],
        1,
        ["decay_ratio = 0.2 has no effect because all training.steps = 50 are in the warm-up"],
    ),
    (["--training.dtype=float64", "--training.mixed_precision_reduce=bfloat16"], 2, ["training.dtype = 'float64'"]),
    ([f"{CP}degree=4", f"{CP}hybrid_degrees", "2", "2"], 4, ["context_parallel_method = 'ring'"]),
    ([FLOAT8, GATHER], 1, ["where parameters are not sharded"]),
    (
        ["--training.loss_chunk_tokens=64", TP2, "--parallelism.disable_loss_parallel"],
        2,
        ["loss_chunk_tokens = 64 has no effect with parallelism.disable_loss_parallel"],
    ),
    (
        ["--training.loss_chunk_tokens=64", FLOAT8, "--float8.filter_fqns=wk"],
        1,
        ["loss_chunk_tokens = 64 has no effect with the output in float8"],
    ),
    (
        ["--checkpoint.interval=7", "--checkpoint.keep_latest_k=3"],
        1,
        ["interval = 7, checkpoint.keep_latest_k = 3 have"],
    ),
    (
        [f"{CP}method=hybrid", f"{CP}hybrid_degrees", "4", "2"],
        8,
        ["method = 'hybrid', parallelism.context_parallel_hybrid"],
    ),
]
REFUSED = [
    (["--training.balance=step"], 2, ["training.balance = 'step'", "use training.attention_mask = 'document'"]),
    (
        ["--training.balance=step", "--training.attention_mask=document", f"{PP}degree=2"],
        4,
        ["in a pipeline (parallelism.pipeline_parallel_degree = 2)", "leave it out"],
    ),
    (["--model.rope_scaling_type=yarn"], 1, ["rope_scaling_type = 'yarn' has no effect without", "rope_scaling = 4.0"]),
    (["--optimizer.qk_clip=100", "--lora.rank=4"], 1, ["qk_clip = 100.0 has no effect with adapters", "leave it out"]),
    (["--model.mtp_layers=1", "--lora.rank=4"], 1, ["mtp_layers = 1 has no effect with adapters", "leave it out"]),
    (["--model.sliding_window_every=2"], 1, ["sliding_window_every = 2 has no effect without", "such as 4096"]),
    (
        ["--checkpoint.enable", "--checkpoint.exclude_from_loading", "optimizer"],
        1,
        ["exclude_from_loading = ['optimizer'] has no effect without checkpoint.load_step; name the saved step"],
    ),
    (
        ["--checkpoint.initial_load_model_only", "false"],
        1,
        ["initial_load_model_only = false has no effect without checkpoint.initial_load_path; name the step-N folder"],
    ),
    (["--checkpoint.load_step=5"], 1, ["load_step = 5 has no effect without checkpoint.enable; switch it on"]),
    ([CP2, f"{CP}keep_exchanged"], 2, ["keep_exchanged = true has no effect", "'ring'", "use 'all_to_all' or"]),
    ([CP2, f"{CP}gradient_dtype=bfloat16", f"{CP}method=all_to_all"], 2, ["has no effect", "which sends no keys"]),
    ([CP2, f"{CP}query_heads_per_pass=1"], 2, ["query_heads_per_pass = 1 has no effect", "'ring'"]),
    ([CP2, f"{CP}heads_per_pass=1"], 2, ["heads_per_pass = 1 has no effect", "'ring'", "use 'all_gather'"]),
]
