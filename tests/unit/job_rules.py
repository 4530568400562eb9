"""Table of the settings that cannot work: the command line, the ranks, and parts of the sentence that refuses them."""

DEGREES = "parallelism.data_parallel_shard_degree"
TP = "--parallelism.tensor_parallel_degree"
CP = "--parallelism.context_parallel_"
A2A = [f"{CP}degree=2", f"{CP}method=all_to_all"]
CHUNKS = "--training.sequence_chunks="
HOST, FREE = "--training.enable_cpu_offload", "--training.max_norm=inf"
EARLY = "--training.early_update"
RECOMPUTED, PARTS = ["--activation_checkpoint.mode=full"], ["--activation_checkpoint.mlp_chunk_tokens=64"]
# arguments, ranks, what the message says
SHARED = "--model.name=gemma4", "--model.flavor=debugmodel_shared"
RULES = [
    (
        [f"{CHUNKS}2", "--model.short_conv_kernel=4"],
        1,
        ["sequence_chunks = 2 does not work with model.short_conv_kernel = 4", "use sequence_chunks = 1"],
    ),
    (
        ["--parallelism.context_parallel_degree", "4", "--training.seq_len", "3"],
        4,
        ["training.seq_len = 3", "context_parallel_degree = 4", "at least 4"],
    ),
    (
        ["--parallelism.context_parallel_degree", "2", TP, "4", "--training.seq_len", "4"],
        8,
        ["training.seq_len = 4", "tensor_parallel_degree = 4", "at least 8"],
    ),
    (
        [f"{CP}degree", "3", f"{CP}method", "all_to_all"],
        3,
        ["context_parallel_method = 'all_to_all' over 3 ranks", "8 query heads", "degrees that work: 1, 2, 4, 8"],
    ),
    (  # after tensor parallelism, a rank has half of the heads
        [f"{CP}degree", "8", TP, "2", f"{CP}method", "all_to_all"],
        16,
        ["over 8 ranks", "4 query heads", "degrees that work: 1, 2, 4"],
    ),
    (
        [f"{CP}degree", "2", f"{CP}heads_per_pass", "1"],
        2,
        ["context_parallel_heads_per_pass = 1 has no effect", "'ring'", "use 'all_gather' or 'all_to_all'"],
    ),
    (
        [f"{CP}degree", "2", f"{CP}gradient_dtype", "bfloat16", "--training.mixed_precision_param", "float32"],
        2,
        ["context_parallel_gradient_dtype = 'bfloat16'", "computes in float32", "mixed_precision_param = 'bfloat16'"],
    ),
    (
        [f"{CP}degree", "2", f"{CP}method", "all_gather", f"{CP}heads_per_pass", "4"],
        2,
        ["context_parallel_heads_per_pass = 4 must be less than the 4 key/value heads", "use fewer"],
    ),
    (
        [f"{CP}degree", "2", f"{CP}method", "all_to_all", f"{CP}heads_per_pass", "1", f"{CP}keep_exchanged"],
        2,
        ["context_parallel_keep_exchanged = true keeps all heads", "heads_per_pass = 1", "use one of them"],
    ),
    (
        [f"{CP}degree", "4", f"{CP}method", "all_to_all", f"{CP}heads_per_pass", "1"],
        4,
        ["context_parallel_heads_per_pass = 1 must be less than the 1 key/value heads"],
    ),
    (
        [*A2A, f"{CP}query_heads_per_pass=2"],
        2,
        ["heads_per_pass = 2 must be less than the 2 query heads"],
    ),
    ([*A2A, f"{CP}query_heads_per_pass=1", f"{CP}heads_per_pass=1"], 2, ["sends one key/value head at a time"]),
    ([*A2A, f"{CP}query_heads_per_pass=1", f"{CP}keep_exchanged"], 2, ["keeps all heads", "query_heads_per_pass = 1"]),
    (
        [f"{CP}degree", "8", f"{CP}method", "hybrid"],
        8,
        ["hybrid_degrees = [] must be degrees [all_to_all, ring]", "one of [2, 4], [4, 2]"],
    ),
    (
        [f"{CP}degree", "8", f"{CP}method", "hybrid", f"{CP}hybrid_degrees", "2", "3"],
        8,
        ["hybrid_degrees = [2, 3]", "context_parallel_degree = 8", "one of [2, 4], [4, 2]"],
    ),
    ([f"{CP}degree", "3", f"{CP}method", "hybrid"], 3, ["hybrid_degrees = []", "use another method or degree"]),
    (
        [f"{CP}degree", "6", f"{CP}method", "hybrid", f"{CP}hybrid_degrees", "3", "2"],
        6,
        ["'hybrid' over 3 ranks", "8 query heads", "degrees that work: 1, 2, 4, 8"],
    ),
    (["--model.sliding_window_every", "2"], 1, ["sliding_window_every = 2 has no effect", "such as 4096"]),
    (["--parallelism.context_parallel_degree", "3"], 4, ["context_parallel_degree = 3", "context_parallel_degree = 4"]),
    (
        ["--lr_scheduler.total_steps", "50", "--lr_scheduler.min_lr_factor", "0.1"],
        1,
        ["warmup_steps = 200", "lr_scheduler.total_steps = 50", "lower it to 5"],
    ),
    (
        ["--training.steps", "1000", "--lr_scheduler.decay_ratio", "0.9"],
        1,
        ["decay_ratio = 0.9", "warmup_steps = 200", "at most 0.8"],
    ),
    (["--lr_scheduler.total_steps", "5000"], 1, ["total_steps = 5000", "training.steps = 10000", "at least 10000"]),
    (
        ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "5"],
        1,
        ["activation_checkpoint.selective_ac_option = '5'", "'op'", "from 1 to 4", "'debugmodel'"],
    ),
    (["--activation_checkpoint.selective_ac_option", "0"], 1, ["selective_ac_option = '0'", "such as '2'"]),
    (
        [*RECOMPUTED, "--activation_checkpoint.offload=inputs", "--activation_checkpoint.offload_keep_last=4"],
        1,
        ["offload_keep_last = 4", "the model keeps the inputs of only 4 layers", "set it to 3 or less"],
    ),
    (
        [*RECOMPUTED, "--activation_checkpoint.offload=inputs", "--parallelism.pipeline_parallel_degree=2"],
        2,
        ["offload_keep_last = 2", "a pipeline stage keeps the inputs of only 2 layers", "set it to 1 or less"],
    ),
    (
        [*RECOMPUTED, "--activation_checkpoint.offload=inputs+attention"],
        1,
        ["offload = 'inputs+attention' needs", "mode = 'selective' by operator", "use 'inputs' instead"],
    ),
    (
        [
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.offload=inputs+attention",
            "--compile.enable",
        ],
        1,
        ["offload = 'inputs+attention' needs", "a model that is not compiled", "use 'inputs' instead"],
    ),
    (
        [*RECOMPUTED, "--activation_checkpoint.group=5"],
        1,
        ["group = 5", "'debugmodel' has 4 layers", "as many or fewer"],
    ),
    (
        [
            *(*RECOMPUTED, "--activation_checkpoint.group=2", "--parallelism.pipeline_parallel_degree=2"),
            *("--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble", "--training.local_batch_size=4"),
        ],
        2,
        ["group = 2 computes the layers of a group", "InterleavedZeroBubble splits it", "use 1, or"],
    ),
    (
        ["--training.enable_cpu_offload", "--parallelism.data_parallel_replicate_degree=2"],
        2,
        ["enable_cpu_offload = true with parallelism.data_parallel_replicate_degree = 2", "use degree 1"],
    ),
    *(
        (
            [EARLY, *arguments],
            ranks,
            ["early_update = true updates parameters on the host during the backward", *words],
        )
        for arguments, ranks, words in (
            ([], 1, ["training.enable_cpu_offload = false", "or leave early_update out"]),
            (
                [HOST, "--training.on_nonfinite=skip"],
                1,
                ["on_nonfinite = 'skip', which keeps all old weights"],
            ),
            ([HOST], 1, ["training.max_norm = 1, for which all gradients are needed"]),
            ([HOST, FREE, "--optimizer.name=Muon"], 1, ["optimizer.name = 'Muon'; AdamW and Adam"]),
            ([HOST, FREE, "--metrics.log_update_norms"], 1, ["metrics.log_update_norms = true"]),
            ([HOST, FREE, "--parallelism.pipeline_parallel_degree=2"], 2, ["pipeline_parallel_degree = 2"]),
        )
    ),
    (
        [
            *("--training.balance=step", "--training.attention_mask=document", "--compile.enable"),
            *("--model.mtp_layers=1", "--parallelism.tensor_parallel_degree=2"),
        ],
        4,
        ["training.balance = 'step' gives each micro-batch another length", "compile.components = ['loss']"],
    ),
    ([f"{CHUNKS}0"], 1, ["training.sequence_chunks = 0 must be at least 1"]),
    (
        [f"{CHUNKS}300", "--training.seq_len=256"],
        1,
        ["sequence_chunks = 300 is more", "256; use at most 256"],
    ),
    (
        [f"{CHUNKS}129", "--training.seq_len=256", "--parallelism.tensor_parallel_degree=2"],
        2,
        ["sequence_chunks = 129", "seq_len = 256 / parallelism.tensor_parallel_degree = 2; use at most 128"],
    ),
    (
        [f"{CHUNKS}4", "--parallelism.context_parallel_degree=2"],
        2,
        ["sequence_chunks = 4 with parallelism.context_parallel_degree = 2", "FSDP, HSDP or TP"],
    ),
    (
        [f"{CHUNKS}4", "--parallelism.pipeline_parallel_degree=2"],
        2,
        ["sequence_chunks = 4 with parallelism.pipeline_parallel_degree = 2", "FSDP, HSDP or TP"],
    ),
    (
        [*SHARED, "--parallelism.pipeline_parallel_degree=2"],
        2,
        ["share keys and values", "pipeline_parallel_degree = 2 would not send between stages"],
    ),
    (
        [*SHARED, "--activation_checkpoint.mode=full", "--activation_checkpoint.group=2"],
        1,
        ["share keys and values", "activation_checkpoint.group = 2 would not compute again"],
    ),
    ([*SHARED, "--model.mtp_layers=1"], 1, ["share keys and values", "leave out model.mtp_layers"]),
    ([*SHARED, "--model.short_conv_kernel=4"], 1, ["share keys and values", "model.short_conv_kernel = 4 is not for"]),
    (
        ["--model.name=gemma4", "--model.rope_scaling=2", "--model.rope_scaling_type=yarn"],
        1,
        ["model.rope_scaling_type = 'yarn' is not for proportional rotary positions"],
    ),
    (
        ["--model.name=gemma4", "--parallelism.tensor_parallel_degree=4"],
        4,
        ["tensor_parallel_degree = 4 must divide the 2 key/value heads"],
    ),
    (
        [
            *("--model.name=gemma4", "--model.flavor=debugmodel_experts", "--compile.enable"),
            "--parallelism.tensor_parallel_degree=2",
        ],
        2,
        ["does not work with the experts of model.name = 'gemma4'", "compile.components = ['loss']"],
    ),
    ([f"{CHUNKS}4", "--model.name=granitemoehybrid"], 1, ["sequence_chunks = 4", "layers of linear attention"]),
    (["--model.name=deepseek_v3", "--model.attention_sinks"], 1, ["model.attention_sinks = True", "latent attention"]),
    (
        [
            *("--model.name=deepseek_v3", "--parallelism.context_parallel_degree=2"),
            *("--parallelism.context_parallel_method=all_to_all", "--parallelism.context_parallel_keep_exchanged"),
        ],
        2,
        ["context_parallel_keep_exchanged = true", "latents"],
    ),
    ([f"{CHUNKS}4", "--model.short_conv_kernel=4"], 1, ["sequence_chunks = 4", "model.short_conv_kernel = 4"]),
    (
        [*PARTS, "--compile.enable", "--activation_checkpoint.mode=memory_budget"],
        1,
        [
            "mlp_chunk_tokens = 64 recomputes each part",
            "mode = 'memory_budget' leaves the choice",
            "mode 'full' or 'none'",
        ],
    ),
    ([*PARTS, "--float8.enable", "--float8.emulate"], 1, ["mlp_chunk_tokens = 64 with float8.enable"]),
    ([*PARTS, "--activation_checkpoint.mode=selective"], 1, ["mlp_chunk_tokens = 64", "by operator keeps some"]),
    (["--activation_checkpoint.selective_ac_option", "ops"], 1, ["selective_ac_option = 'ops'", "'op'"]),
    (
        ["--profiling.enable_profiling", "--profiling.profile_freq", "3"],
        1,
        ["profile_freq = 3", "profiler_warmup = 3 + profiling.profiler_active = 1", "at least 4"],
    ),
    (
        ["--profiling.enable_profiling", "--training.steps", "50"],
        1,
        ["profile_freq = 100", "training.steps = 50", "at most 50"],
    ),
    (
        ["--profiling.enable_memory_snapshot", "--training.steps", "50"],
        1,
        ["profile_freq = 100", "training.steps = 50", "at most 50"],
    ),
    ([f"--{DEGREES}", "3"], 8, [f"{DEGREES} = 3", "world size of 8", f"{DEGREES} = 8", "3 ranks"]),
    ([TP, "3"], 8, ["tensor_parallel_degree = 3", "world size of 8", "tensor_parallel_degree = 4"]),
    ([TP, "0"], 8, ["tensor_parallel_degree = 0", "at least 1"]),
    (["--training.global_batch_size", "12"], 2, ["global_batch_size = 12", "= 8 x", "degree 2 = 16", "use 16 or -1"]),
    (["--training.global_batch_size", "40"], 2, ["global_batch_size = 40", "use 32 or 48 or -1"]),
    (["--training.global_batch_size", "0"], 1, ["global_batch_size = 0", "use 8 or -1"]),
    ([TP, "2", "--training.seq_len", "7"], 2, ["seq_len = 7", "tensor_parallel_degree = 2", "use 6 or 8"]),
    ([TP, "8"], 8, ["tensor_parallel_degree = 8", "4 key/value heads", "'debugmodel'", "1, 2, 4"]),
    ([TP, "3", "--training.seq_len", "9"], 3, ["tensor_parallel_degree = 3", "8 attention heads", "1, 2, 4"]),
    (
        [TP, "8", "--model.flavor", "3B", "--model.tokenizer_path", "odd.tiktoken"],
        8,
        ["tensor_parallel_degree = 8", "513 tokens in the vocabulary", "that fit this model: 1"],
    ),
    (["--model.flavor", "9B"], 1, ["model.flavor = '9B'", "debugmodel, 7B, 1B"]),
    (["--model.flavor", "debug"], 1, ["model.flavor = 'debug'", "'debugmodel'"]),
    (["--model.name", "lama3"], 1, ["model.name = 'lama3'", "'llama3'"]),
    (["--model.tokenizer_path", "nowhere.model"], 1, ["model.tokenizer_path = 'nowhere.model'", "does not exist"]),
    (["--model.tokenizer_path", ""], 1, ["model.tokenizer_path = ''", "leave it out"]),
    (["--training.dataset", "python_stdlb"], 1, ["training.dataset = 'python_stdlb'", "'python_stdlib'"]),
    (["--training.dataset", "text"], 1, ["training.dataset = 'text'", "training.dataset_path"]),
    (["--training.dataset", "text", "--training.dataset_path", "no.txt"], 1, ["training.dataset_path = 'no.txt'"]),
    (["--training.dataset", "text", "--training.dataset_path", "empty.txt"], 1, ["dataset_path = 'empty.txt'"]),
    (["--training.dataset_path", "one.txt"], 1, ["training.dataset_path = 'one.txt'", "leave it out", "'text'"]),
    (
        ["--training.dataset", "text", "--training.dataset_path", "one.txt", "--training.data_streams", "64"],
        1,
        ["training.data_streams = 64", "leave it out", "at most 1"],
    ),
    (["--job.dump_folder", "one.txt"], 1, ["job.dump_folder = 'one.txt'", "is a file", "./outputs"]),
    (["--job.dump_folder", "one.txt/deep/down"], 1, ["job.dump_folder = 'one.txt/deep/down'", "one.txt is a file"]),
    (["--job.dump_folder", "broken"], 1, ["job.dump_folder = 'broken'", "broken link"]),
    (["--job.dump_folder", ""], 1, ["job.dump_folder = ''", "./outputs"]),
    (["--activation_checkpoint.mode=memory_budget"], 1, ["mode = 'memory_budget'", "compile.enable", "'selective'"]),
    (
        ["--activation_checkpoint.mode=memory_budget", "--compile.enable", "--compile.components", "loss"],
        1,
        ["mode = 'memory_budget'", "'model' in compile.components"],
    ),
    (
        ["--activation_checkpoint.mode=memory_budget", "--compile.enable", "--compile.backend=eager"],
        1,
        ["mode = 'memory_budget'", "other than 'eager'"],
    ),
    (["--parallelism.enable_async_tensor_parallel", TP, "2"], 2, ["enable_async_tensor_parallel", "compile.enable"]),
    (
        ["--parallelism.enable_async_tensor_parallel", TP, "2", "--compile.enable", "--compile.backend=aot_eager"],
        2,
        ["enable_async_tensor_parallel", "compile.backend = 'inductor'"],
    ),
]

# Arguments and ranks of more jobs that are refused, some for several reasons.
SPARSE = "--model.name=olmoe"
BY_MICRO_BATCH = [SPARSE, "--model.router_aux_loss_load=micro_batch"]
ASYNC = [f"{TP}=2", "--parallelism.enable_async_tensor_parallel"]
FLOAT8 = "--float8.enable"
BESIDE_OTHERS = [
    (["--lora.rank=4", FLOAT8], 1),
    (["--lora.rank=4", "--lora.dropout=0.1", "--training.balance=step", "--training.attention_mask=document"], 2),
    ([*BY_MICRO_BATCH, "--model.router_aux_loss_coef=0"], 1),
    ([*BY_MICRO_BATCH, "--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4"], 2),
    ([*BY_MICRO_BATCH, f"{CHUNKS}2"], 1),
    ([SPARSE, "--activation_checkpoint.mode=memory_budget"], 1),
    ([SPARSE, FLOAT8], 1),
    ([SPARSE, *ASYNC], 2),
    ([FLOAT8, "--training.dtype=float64"], 1),
    ([FLOAT8, *ASYNC], 2),
]
