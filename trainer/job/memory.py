"""What one rank holds, estimated from sizes before anything starts. Torch-free.

Exact: weights, gradients and optimizer state. Estimated, for eager decoder layers to about a tenth: activations, logits
and gathered parameters. What PyTorch, NCCL and the CUDA context take themselves is not counted.
"""

import math

from trainer.config.errors import ConfigError
from trainer.families.args import experts_of
from trainer.job.lora import adapter_sizes
from trainer.job.pipeline_stages import layers_of, layers_of_stages
from trainer.job.record import ResolvedJob
from trainer.job.sizes import ITEMSIZE, RankMemory, size_words

_LARGEST = 2**42
"""More than any device has, in bytes."""


def rank_memory(job: ResolvedJob) -> RankMemory:
    """Return an estimate of what the largest rank of the job holds."""
    return job.task.memory(job)


def check_memory(job: ResolvedJob, available: int | None) -> None:
    """Check that the exact part of what a rank holds fits. available: bytes of a rank's device; None: not known.

    Raises:
        ConfigError: it does not fit, or no device has so much.
    """
    memory, limit = rank_memory(job), available or _LARGEST
    floor = memory.tables
    if not job.config.training.enable_cpu_offload:
        floor += memory.weights + memory.gradients + memory.optimizer
    if floor > limit:
        has = f"it has {size_words(limit)}" if available else "no device has that"
        training = job.config.training
        what = f"training.seq_len = {training.seq_len}" if job.task.name == "tokens" else f"{job.task.sample}s"
        batch, shorter = "", "a shorter length"
        if training.local_batch_size > 1:
            batch, shorter = f"training.local_batch_size = {training.local_batch_size}, ", "a smaller batch or length"
        raise ConfigError(
            f"{batch}{what} and model.flavor = {job.config.model.flavor!r} take at "
            f"least {size_words(floor)} a rank for weights, gradients, optimizer, rotary table and batch, and {has}; "
            f"use {shorter}, a smaller model, or more ranks that shard it"
        )


def memory_of_stage(job: ResolvedJob, pp_rank: int) -> RankMemory:
    degrees, training, model = job.degrees, job.config.training, job.model
    stored, compute = ITEMSIZE[training.dtype], ITEMSIZE[job.compute_dtype]
    modules = model.module_names()
    if job.pipeline is not None:
        modules = tuple(name for stage in job.pipeline.stages_of(pp_rank) for name in job.pipeline.stages[stage])
    adapters = _by_module(adapter_sizes(job.config, model, degrees.tp))
    sizes = _parameters(job)
    own = [sizes.get(name, 0) for name in modules]
    shards = degrees.dp_shard * degrees.cp
    layers = layers_of(modules)
    # Weights of a rank's experts in one layer, which its `efsdp` ranks divide.
    of_experts = len(layers) and _experts(job)
    local = math.ceil(sum(own) / shards) + len(layers) * math.ceil(of_experts / degrees.efsdp)
    trained = math.ceil(sum(adapters.get(name, 0) for name in modules) / shards) if adapters else local
    gathered = max(own) * (shards > 1) + of_experts * (degrees.efsdp > 1)
    all_gathered = sum(own) * (shards > 1) + len(layers) * of_experts * (degrees.efsdp > 1)
    kept_whole = job.config.parallelism.fsdp_reshard_after_forward == "never" or degrees.pp > 1
    tokens, in_flight = job.tokens_of_a_pass, _passes_in_flight(job)
    logits = _logits(job, tokens, compute) if "output" in modules else 0
    table = training.seq_len * model.head_dim * max(stored, 4)
    return RankMemory(
        weights=(local + (trained if adapters else 0)) * stored,
        gradients=trained * stored,
        optimizer=2 * trained * stored,
        gathered=(all_gathered if kept_whole else 2 * gathered) * compute + gathered * max(compute, 4),
        activations=in_flight * tokens * compute * (_kept(job, layers) - _offloaded(job, pp_rank)) // degrees.tp,
        logits=logits,
        tables=table + 4 * 8 * training.local_batch_size * training.seq_len,
    )


def _parameters(job: ResolvedJob) -> dict[str, int]:
    """Return the parameters of each module that a pipeline can divide, on one tensor-parallel rank."""
    model, tp = job.model, job.degrees.tp
    sizes = _by_module({name: math.prod(shape) for name, shape in model.linear_shapes(tp).items()})
    if not model.tie_embeddings:
        sizes["tok_embeddings"] = model.vocab_size * model.dim // tp
    return sizes


def _by_module(sizes: dict[str, int]) -> dict[str, int]:
    """Return the sums over the linear modules, by name, of each module that a pipeline can divide."""
    sums: dict[str, int] = {}
    for name, size in sizes.items():
        module = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name
        sums[module] = sums.get(module, 0) + size
    return sums


def _experts(job: ResolvedJob) -> int:
    """Return the weights of a rank's experts in one layer."""
    experts = experts_of(job.model)
    return 0 if experts is None else experts.number // job.degrees.ep * experts.weights(job.model.dim)


def _logits(job: ResolvedJob, tokens: int, compute: int) -> int:
    """Return the bytes of the logits of so many tokens, or in chunks of one, and the sum of the weight's gradient."""
    vocabulary, dim = job.model.linear_shapes(job.degrees.tp)["output"]
    if chunk := job.loss_chunk_tokens:
        # In half precision the logits beside their float32 logarithms, and the float32 sum beside its rounded copy.
        return (compute if compute >= 4 else compute + 4) * vocabulary * (min(chunk, tokens) + dim)
    # Eager: the float32 logits beside their logarithms, later beside their gradient.
    return 2 * (compute if job.compilation.loss else max(compute, 4)) * tokens * vocabulary


def _passes_in_flight(job: ResolvedJob) -> int:
    """Return how many forwards of a rank wait for their backward at most."""
    if job.pipeline is None:
        return 1
    passes = job.pipeline.micro_batches
    return passes if job.pipeline.schedule in ("GPipe", "LoopedBFS") else min(passes, job.degrees.pp)


def _exchanged(job: ResolvedJob) -> int:
    """Return the elements per token that attention keeps of an exchange of heads, beside q, k, v: outputs, copies."""
    if job.attention is None or not job.attention.keep_exchanged:
        return 0
    model, degree = job.model, job.attention.head_degree(job.degrees.cp) * job.degrees.tp
    return (model.n_heads + 2 * (math.lcm(model.n_kv_heads, degree) - model.n_kv_heads)) * model.head_dim


def host_memory(job: ResolvedJob) -> int:
    """Return the bytes of page-locked host memory that the inputs of layers take on the rank with most."""
    offloaded = max(_offloaded(job, pp_rank) for pp_rank in range(job.degrees.pp))
    return _passes_in_flight(job) * job.tokens_of_a_pass * ITEMSIZE[job.compute_dtype] * offloaded // job.degrees.tp


def _offloaded(job: ResolvedJob, pp_rank: int) -> int:
    """Return the elements per token that a rank keeps on the host."""
    stages = layers_of_stages(job.pipeline, job.model.n_layers)
    own = stages if job.pipeline is None else [stages[stage] for stage in job.pipeline.stages_of(pp_rank)]
    return job.model.dim * sum(len(job.config.activation_checkpoint.offloaded(layers)) for layers in own)


def _kept(job: ResolvedJob, layers: list[int]) -> int:
    """Return the elements per token that these layers keep for the backward, and what one of them recomputes.

    Counted with hooks on what autograd saves: inputs of all products, rotated queries and keys, the parts of the gated
    feed-forward, and in half precision the float32 inputs of norms.
    """
    settings, model = job.config.activation_checkpoint, job.model
    if not layers:
        return 0
    outputs = sum(out for name, (out, _) in model.linear_shapes().items() if name.startswith(f"layers.{layers[0]}."))
    everything = 2 * outputs + (2 if job.compute_dtype in ("float32", "float64") else 6) * model.dim
    by_operator = model.dim + model.n_heads * model.head_dim + outputs // 2
    if (experts := experts_of(model)) is not None:
        # Of each pair of token and expert: input, parts of the gated unit, output twice; and what the router reads. In
        # half precision one output and this are float32. A mean rank has so many pairs.
        wider = 1 if job.compute_dtype in ("float32", "float64") else 2
        everything += experts.per_token * ((2 + wider) * model.dim + 4 * experts.hidden_dim) + wider * model.dim
        by_operator += experts.per_token * 2 * experts.hidden_dim
    kept = _exchanged(job)
    if model.qk_norm:  # what is normalised and the result, both in at least float32
        by_element = 2 if job.compute_dtype in ("float32", "float64") else 4
        everything += by_element * (model.n_heads + model.n_kv_heads) * model.head_dim
    everything, by_operator = everything + kept, by_operator + kept
    if job.compilation.model:  # the compiler recomputes what is cheap
        everything = outputs + model.n_heads * model.head_dim + 2 * model.dim + kept
    in_work = everything
    if job.mlp_tiles > 1:  # both inner products, what is made of them, and their product, of one part at a time
        inner = 4 * model.linear_shapes()[f"layers.{layers[0]}.feed_forward.w1"][0]
        everything -= inner
        in_work = everything + inner // job.mlp_tiles
    if settings.mode == "none":
        return len(layers) * everything + in_work - everything
    if settings.mode == "memory_budget":
        return round(len(layers) * max(settings.memory_budget * everything, model.dim)) + in_work
    if settings.mode == "full":
        return len(layers) * model.dim + in_work
    if settings.every is None:
        return len(layers) * by_operator + in_work
    whole = len(settings.checkpointed(layers))
    return whole * model.dim + (len(layers) - whole) * everything + in_work
