"""Names of settings in other programs, and what to write here instead.

They are of Hugging Face's Trainer and TRL, Megatron-LM, DeepSpeed, Axolotl and Lightning, without their tables. A name
that is also the name of a key here, such as `lr`, does not stand here. torchtitan's keys are in `torchtitan.py`.
"""

_MICRO_BATCH = "use training.local_batch_size, for each data-parallel rank"
_BATCH = "use training.global_batch_size"
_ACCUMULATION = (
    "set training.global_batch_size: gradients are accumulated over as many micro-batches of "
    "training.local_batch_size as it takes"
)
_LENGTH = "use training.seq_len"
_EPOCHS = "set training.steps: the length of a run is a number of steps, and the data are repeated as needed"
_PRECISION = "set training.mixed_precision_param = 'bfloat16' or 'float32'"
_FLOAT16 = "there is no float16; set training.mixed_precision_param = 'bfloat16'"
_SHARDING = "set parallelism.data_parallel_shard_degree: FSDP shards parameters, gradients and optimizer state"
_SAVE = "set checkpoint.enable, with job.dump_folder and checkpoint.folder for the place"
_LOAD = "set checkpoint.enable: the same command resumes from its latest checkpoint, or from checkpoint.load_step"
_RECOMPUTE = "use activation_checkpoint.mode"
_DATA = "set training.dataset = 'text', 'jsonl' or 'chat', and training.dataset_path"
_ANSWERS = "leave it out: with training.dataset = 'chat' answers alone have labels"
_TOKENIZER = "use model.tokenizer_path"
_FLAVOR = "use model.path for a Hugging Face folder, or model.flavor for a size"
_WARMUP_SHARE = "set lr_scheduler.warmup_steps, a number of steps"
_SEQUENCE_PARALLEL = "set parallelism.tensor_parallel_degree, which has it built in"
_ULYSSES = "use parallelism.context_parallel_degree, and parallelism.context_parallel_method = 'all_to_all'"
_TRACKER = "use metrics.enable_wandb or metrics.enable_tensorboard, or read metrics.jsonl in job.dump_folder"
_HEADS = "use model.flavor: the sizes of a model are fixed by it"
_LAUNCH = "give the number of ranks to the launcher: NGPU=8 ./run_llama_train.sh; --world-size is for --check-config"
_NODES = "set the variables NNODES, MASTER_ADDR and MASTER_PORT on every node (docs/several_nodes.md)"
_BUILT_IN = "leave it out: PyTorch's fast attention is chosen by itself, see parallelism.context_parallel_kernel"

_GROUPS = (
    # Batch, length and number of steps
    ("per_device_train_batch_size per_gpu_train_batch_size micro_batch_size", _MICRO_BATCH),
    ("train_micro_batch_size_per_gpu micro_batch per_device_batch_size device_batch_size mbs", _MICRO_BATCH),
    ("train_batch_size total_batch_size gbs", _BATCH),
    ("gradient_accumulation_steps accumulate_grad_batches grad_accum_steps grad_accum", _ACCUMULATION),
    ("seq_length sequence_length sequence_len max_seq_length max_seq_len max_length max_sequence_length", _LENGTH),
    ("context_length block_size max_position_embeddings model_max_length cutoff_len ctx_len n_ctx", _LENGTH),
    ("num_train_epochs num_epochs epochs n_epochs max_epochs", _EPOCHS),
    ("max_steps train_iters num_steps train_steps max_iters num_iterations", "use training.steps"),
    ("total_tokens train_tokens train_samples", _EPOCHS),
    ("num_workers dataloader_num_workers", "leave it out: training reads token files, without workers"),
    ("data_blend blend dataset_weights data_mixture", "set mixture.names, mixture.paths and mixture.weights"),
    ("sample_packing", "set training.packing, which is on by default; see training.attention_mask"),
    ("reset_attention_mask reset_position_ids eod_mask_loss", "set training.attention_mask = 'document'"),
    # Optimizer
    ("learning_rate base_lr max_lr peak_lr", "use optimizer.lr"),
    ("min_lr min_learning_rate lr_min", "set lr_scheduler.min_lr_factor, a share of optimizer.lr"),
    ("adam_beta1", "use optimizer.beta1"),
    ("adam_beta2", "use optimizer.beta2"),
    ("betas adam_betas", "use optimizer.beta1 and optimizer.beta2"),
    ("adam_epsilon adam_eps epsilon", "use optimizer.eps"),
    ("wd decay_weight", "use optimizer.weight_decay"),
    ("optim optimizer_type", "use optimizer.name"),
    ("max_grad_norm clip_grad gradient_clipping gradient_clip_val grad_clip clip_grad_norm", "use training.max_norm"),
    ("warmup_ratio lr_warmup_fraction warmup_fraction", _WARMUP_SHARE),
    ("lr_warmup_iters num_warmup_steps warmup_iters lr_warmup_steps", "use lr_scheduler.warmup_steps"),
    ("lr_scheduler_type lr_decay_style scheduler_type", "use lr_scheduler.decay_type"),
    ("lr_decay_iters lr_decay_steps", "use lr_scheduler.total_steps"),
    # Precision and memory
    ("bf16 fp32 tf32 params_dtype torch_dtype precision mixed_precision compute_dtype", _PRECISION),
    ("fp16 float16 half", _FLOAT16),
    ("fp8 fp8_format fp8_recipe transformer_impl", "use float8.enable"),
    ("gradient_checkpointing recompute_activations recompute_granularity activation_checkpointing", _RECOMPUTE),
    ("recompute_method recompute_num_layers checkpoint_activations", _RECOMPUTE),
    ("cpu_offload offload_optimizer offload_param cpu_offloading", "use training.enable_cpu_offload"),
    ("torch_compile", "use compile.enable"),
    ("use_flash_attn flash_attention flash_attn attn_implementation use_flash_attention", _BUILT_IN),
    # Parallelism
    ("tensor_model_parallel_size tensor_parallel_size tp tp_size", "use parallelism.tensor_parallel_degree"),
    ("pipeline_model_parallel_size pipeline_parallel_size pp pp_size", "use parallelism.pipeline_parallel_degree"),
    ("context_parallel_size cp cp_size sequence_parallel_degree", "use parallelism.context_parallel_degree"),
    ("ulysses_degree ulysses_sequence_parallel_size", _ULYSSES),
    ("cp_comm_type", "use parallelism.context_parallel_method"),
    ("sequence_parallel", _SEQUENCE_PARALLEL),
    ("data_parallel_size dp dp_size fsdp zero_stage zero_optimization fsdp_config sharding_strategy", _SHARDING),
    ("use_distributed_optimizer deepspeed use_torch_fsdp2 dp_shard", _SHARDING),
    ("dp_replicate hsdp num_distributed_optimizer_instances", "use parallelism.data_parallel_replicate_degree"),
    ("nproc_per_node num_gpus ngpu n_gpus gpus devices", _LAUNCH),
    ("nnodes num_nodes node_rank master_addr master_port rdzv_endpoint", _NODES),
    # Data and model
    ("data_path train_data_path train_file data_files dataset_name datasets dataset_dir data", _DATA),
    ("chat_template_path chat_template_name apply_chat_template", "use model.chat_template"),
    ("train_on_inputs train_on_prompt completion_only_loss assistant_only_loss", _ANSWERS),
    ("tokenizer tokenizer_model tokenizer_name tokenizer_name_or_path vocab_file tokenizer_type", _TOKENIZER),
    ("model_name_or_path base_model model_name model_type pretrained_model_name_or_path", _FLAVOR),
    ("num_layers n_layers hidden_size num_attention_heads ffn_hidden_size num_query_groups n_heads", _HEADS),
    ("num_hidden_layers intermediate_size num_key_value_heads vocab_size", _HEADS),
    ("rotary_base rope_base", "use model.rope_theta"),
    ("window_size window", "use model.sliding_window"),
    ("normalization", "use model.norm_type"),
    # Checkpoints and logging
    ("save save_dir output_dir out_dir ckpt_dir checkpoint_dir save_path save_strategy", _SAVE),
    ("save_interval save_steps save_every checkpoint_interval", "use checkpoint.interval"),
    ("save_total_limit keep_last_n_checkpoints", "use checkpoint.keep_latest_k"),
    ("load load_dir resume resume_from_checkpoint resume_from ckpt_step", _LOAD),
    ("async_save", "set checkpoint.async_mode = 'async'"),
    ("logging_steps log_interval log_every log_every_n_steps logging_interval", "use metrics.log_freq"),
    ("tensorboard_dir logging_dir", "set metrics.enable_tensorboard and metrics.save_tb_folder"),
    ("report_to wandb wandb_project use_wandb", _TRACKER),
    ("profile profiler", "use profiling.enable_profiling"),
    ("random_seed data_seed manual_seed", "use training.seed"),
    ("config config_path config_name", "use --job.config_file"),
    ("timeout distributed_timeout_minutes ddp_timeout", "use comm.train_timeout_seconds"),
)  # fmt: skip

ELSEWHERE = {name: advice for names, advice in _GROUPS for name in names.split()}
