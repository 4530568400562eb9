"""The decisions of a job in words, each with its reason: what `check` prints, and a run at its start. Torch-free."""

from pathlib import Path
from textwrap import TextWrapper

from trainer.checkpoint.folder import checkpoint_folder, step_to_load
from trainer.config.errors import MissingFile
from trainer.config.writable import is_address
from trainer.job.attention import faster_packages
from trainer.job.experts import dispatch_bytes, ranks_of_a_token
from trainer.job.lora import adapter_sizes
from trainer.job.memory import ITEMSIZE, rank_memory, size_words
from trainer.job.mesh_picture import mesh_picture
from trainer.job.record import ResolvedJob
from trainer.models.args import experts_of, has_windows
from trainer.models.registry import is_folder

WIDTH = 100
_TOPIC = 13


def summary(job: ResolvedJob, width: int = WIDTH) -> str:
    """Return one paragraph per decision, in lines of at most `width` characters.

    Raises:
        ConfigError: the configured kernel cannot run on the job's type of device.
    """
    topics = {
        "model": [_model(job)],
        "weights": [_weights(job)],
        "data": [_data(job)],
        "step": [_step(job)],
        "mesh": [_mesh(job), *mesh_picture(job.degrees)],
        "experts": [_experts(job)],
        "pipeline": [_pipeline(job)],
        "fields": [_fields(job)],
        "attention": [_attention(job)],
        "loss": [_loss(job)],
        "precision": [_precision(job)],
        "recomputed": [_recomputed(job)],
        "compiled": [_compiled(job)],
        "checkpoints": [_checkpoints(job)],
        "memory": [_memory(job)],
    }
    wrap = TextWrapper(max(width, 2 * _TOPIC) - _TOPIC, break_on_hyphens=False, break_long_words=False).wrap
    lines = []
    for topic, paragraphs in topics.items():
        text = [line for paragraph in paragraphs if paragraph for line in wrap(paragraph)]
        if topic == "mesh":  # a picture keeps its blanks
            text = [*wrap(paragraphs[0]), *paragraphs[1:]]
        for number, line in enumerate(text):
            lines.append(f"{topic if number == 0 else '':{_TOPIC}}{line}")
    return "\n".join(lines)


def closing(job: ResolvedJob, *, checkpoint: object, program: str) -> str:
    """Return where everything of a finished run lies, and what to run next.

    checkpoint: of the last step, if any; program: how a user calls `lct`.
    """
    folder, metrics = Path(job.config.job.dump_folder), job.config.metrics
    lines = [f"{'metrics':{_TOPIC}}{folder / 'metrics.jsonl'}"]
    if metrics.enable_tensorboard:
        lines.append(f"{'curves':{_TOPIC}}tensorboard --logdir {folder / metrics.save_tb_folder}")
    if checkpoint is None:
        lines.append(f"{'weights':{_TOPIC}}not saved; --checkpoint.enable saves them")
    else:
        lines.append(f"{'weights':{_TOPIC}}{checkpoint}")
        follow = "forecast {}" if job.config.trains_fields else "generate {} --prompt '...'"
        lines.append(f"{'next':{_TOPIC}}{program} {follow.format(folder)}")
        if not job.config.checkpoint.last_save_model_only:
            lines.append(f"{'':{_TOPIC}}the same command with a larger --training.steps trains on")
    return "\n".join(lines)


def _model(job: ResolvedJob) -> str:
    settings, model = job.config.model, job.model
    text = f"{settings.name} {settings.flavor}: {model.n_params():,} parameters, {model.words()}"
    if adapters := sum(adapter_sizes(job.config, model).values()):
        lora = job.config.lora
        where = ", ".join(lora.modules) or "all linear modules of layers"
        text += f"; trained are {adapters:,} of adapters of rank {lora.rank} on {where} (LoRA)"
    return text


def _weights(job: ResolvedJob) -> str:
    """Return where the weights of the first step come from."""
    config = job.config
    try:
        step = step_to_load(config) if config.checkpoint.enable else None
    except MissingFile:  # of a check for machines that reach the store
        return f"of the latest step in {checkpoint_folder(config)}, if it holds one"
    if step is not None and not config.lora.rank:
        return f"of step {step:,} in {checkpoint_folder(config)}"
    if (initial := config.checkpoint.initial_load_path) is not None:
        adapters = f", adapters of step {step:,} in {checkpoint_folder(config)}" if step is not None else ""
        return f"of {initial}{adapters or ', adapters new' * bool(config.lora.rank)}"
    flavor = config.model.flavor
    sizes = f"; {flavor} gives the sizes alone: model.path = {flavor!r} takes its weights, too"
    return f"random, seed {config.training.seed}{sizes * is_folder(flavor)}"


def _data(job: ResolvedJob) -> str:
    training = job.config.training
    source = training.dataset + (f" {training.dataset_path}" if training.dataset_path else "")
    mixture = job.config.mixture
    if mixture.names:
        shares = zip(mixture.names, mixture.weights, strict=True)
        source += ": " + ", ".join(f"{name} {weight / sum(mixture.weights):.1%}" for name, weight in shares)
    streams = f", in {training.data_streams} streams" if training.data_streams else ""
    if job.config.trains_fields:
        model, fields = job.model, job.config.fields
        return (
            f"{source}: {model.channels} channels on {model.height} x {model.width} points{streams}; "
            f"predicted {fields.lead} frame{'s' * (fields.lead > 1)} ahead; {fields.held_out} trajectories held out"
        )
    vocabulary = "; embeddings for" if is_folder(job.config.model.flavor) else " with"
    return (
        f"{source}{streams}; tokenizer {Path(job.config.model.tokenizer_file).name}"
        f"{vocabulary} {job.model.vocab_size:,} tokens"
    )


def _step(job: ResolvedJob) -> str:
    training, sequences = job.config.training, job.sequences_per_step
    tokens = sequences * job.positions
    position, sample = ("points", "field") if job.config.trains_fields else ("tokens", "sequence")
    whole = training.steps * tokens
    millions = (
        f"{whole:,}" if whole < 1e6 else f"{whole / 1e6:,.1f} million" if whole < 1e9 else f"{whole / 1e9:,.1f} billion"
    )
    dealt = ", documents dealt for equal work" * job.balances
    return (
        f"{tokens:,} {position}: {sequences} {sample}s of {job.positions:,} = {job.micro_batches} micro-batch"
        f"{'es' * (job.micro_batches > 1)} x {training.local_batch_size} "
        f"{sample}{'s' * (training.local_batch_size > 1)} x {job.degrees.dp} data-parallel "
        f"rank{'s' * (job.degrees.dp > 1)}{dealt}; {training.steps:,} steps are {millions} {position}"
    )


def _mesh(job: ResolvedJob) -> str:
    degrees = job.degrees
    device = {"cuda": "GPU", "cpu": "CPU rank"}[job.device_type]
    shards, replicas = degrees.dp_shard * degrees.cp, degrees.dp_replicate
    if degrees.world_size == 1:
        return f"one {device}"
    shared = "domain" if degrees.domain else "cp"
    whose = f"dp_shard x {shared}" if degrees.dp_shard > 1 and degrees.cp > 1 else shared
    whose = whose if degrees.cp > 1 else "dp_shard"
    sharded = f"{whose} = {shards} ranks shard parameters and optimizer (FSDP)" if shards > 1 else ""
    copies = f"{replicas} copies of them (HSDP)" if shards > 1 else f"{replicas} copies of the parameters (DDP)"
    parts = [part for part in (sharded, copies if replicas > 1 else "") if part]
    return "; ".join([f"{degrees.text()} = {degrees.world_size} {device}s", *parts])


def _pipeline(job: ResolvedJob) -> str:
    plan = job.pipeline
    if plan is None:
        return ""
    sizes = ", ".join(str(len(stage)) for stage in plan.stages)
    return (
        f"{plan.csv or plan.schedule}: {len(plan.stages)} stages of {sizes} modules, {plan.micro_batches} micro-batches"
        " in a pass"
    )


def _experts(job: ResolvedJob) -> str:
    model, degrees = job.model, job.degrees
    if (experts := experts_of(model)) is None:
        return ""
    ways = {"auxiliary loss": model.router_aux_loss_coef, "bias": model.router_bias_update_rate}
    by = [f"by {name} ({rate:g})" for name, rate in ways.items() if rate]
    parts = [f"balanced {' and '.join(by)}" if by else "not balanced (model.router_aux_loss_coef = 0)"]
    shards = f"{degrees.efsdp} ranks shard each one's weights" if degrees.efsdp > 1 else "each one whole on its rank"
    if degrees.ep == 1:
        return "; ".join([f"all on every rank, {shards}" if degrees.efsdp > 1 else "all on every rank", *parts])
    away = ranks_of_a_token(experts, degrees.ep)
    shape = {"dim": model.dim, "itemsize": ITEMSIZE[job.compute_dtype], "per_token": experts.per_token}
    rows = job.tokens_of_a_pass / degrees.tp * away
    sent = sum(dispatch_bytes(rows, rows, **shape, weight_itemsize=max(ITEMSIZE[job.compute_dtype], 4)).values())
    return "; ".join(
        [
            f"{experts.number // degrees.ep} of {experts.number} on each of ep {degrees.ep} ranks, {shards}",
            f"a token travels to {away:.2f} other ranks if it chooses among all alike: about {size_words(sent)} a "
            "layer, forward and backward, from each rank",
            *parts,
        ]
    )


def _fields(job: ResolvedJob) -> str:
    parts = []
    for axis, layout in zip(("height", "width"), job.field_layouts, strict=False):
        rows = [layout.local_length(rank) for rank in range(layout.degree)]
        shown = ", ".join(map(str, rows)) if len(rows) <= 8 else f"{rows[0]}, {rows[1]} ... {rows[-1]}"
        parts.append(f"{axis} {layout.length} as {shown}")
    return f"divided over the domain: {'; '.join(parts)}" if parts else ""


def _attention(job: ResolvedJob) -> str:
    config, options = job.config, job.attention
    if config.trains_fields:
        return ""
    if options is None:
        return "causal, by PyTorch itself: one rank has the whole sequence"
    mask = "causal mask within packed documents" if config.masks_documents else "causal mask"
    if has_windows(job.model):
        layers = [layer for layer in range(job.model.n_layers) if job.model.window_of_layer(layer) is not None]
        every = layers[1] if len(layers) > 1 else job.model.n_layers
        where = "" if every == 1 else f" in every {every}th layer" if every > 3 else f" in one of {every} layers"
        mask += f", a window of {job.model.window_of_layer(0):,} tokens{where}"
    parts = [mask]
    if job.degrees.cp > 1:
        chosen = f" (auto: {job.attention_reason})" if job.attention_reason else ""
        parts.append(f"{options.method} over {job.degrees.cp} ranks{chosen}")
        parts.append(
            {
                "head_tail": "head_tail: a piece from the head and one from the tail a rank, for equal causal work",
                "contiguous": "contiguous: one piece a rank, for windows",
                "balanced": "balanced: documents dealt by work and traffic, for each batch",
            }[options.balancer]
        )
    how = "auto: by device, type and tiles" if config.parallelism.context_parallel_kernel == "auto" else "as set"
    faster = faster_packages(job.kernel, config)
    return "; ".join([*parts, f"kernel {job.kernel} ({how})", *([faster] if faster else [])])


def _loss(job: ResolvedJob) -> str:
    if job.config.trains_fields:
        return ""
    tokens, reason = job.loss_chunk
    why = f" ({reason or 'as set'})"
    return (f"in chunks of {tokens:,} tokens" if tokens else "from all logits of a micro-batch at once") + why


def _precision(job: ResolvedJob) -> str:
    training, degrees = job.config.training, job.degrees
    why = "as set"
    if training.mixed_precision_param == "auto":
        why = "auto: bfloat16 on GPUs" if job.device_type == "cuda" else "auto: the stored type on CPUs"
    text = f"parameters and optimizer in {training.dtype}, computing in {job.compute_dtype} ({why})"
    if degrees.dp * degrees.cp > 1:
        text += f", gradients summed in {'float64' if training.dtype == 'float64' else training.mixed_precision_reduce}"
    return text + (f"; float8 products, {job.config.float8.recipe_name}" if job.config.float8.enable else "")


def _recomputed(job: ResolvedJob) -> str:
    settings = job.config.activation_checkpoint
    if settings.mode == "selective":
        if settings.every is not None:
            return f"activations of every {settings.every}th layer (selective)"
        return "activations but for attention and every second matrix product (selective, by operator)"
    return {
        "none": 'nothing: all activations are kept (activation_checkpoint.mode = "none")',
        "full": "all activations but the input of each layer (full)",
        "memory_budget": f"what the compiler chooses, to keep {settings.memory_budget:.0%} of the activations",
    }[settings.mode]


def _compiled(job: ResolvedJob) -> str:
    compilation = job.compilation
    if not compilation.any:
        return "nothing (compile.enable = false)"
    parts = [name for name, on in (("each layer", compilation.model), ("the loss", compilation.loss)) if on]
    return f"{' and '.join(parts)}, by {compilation.backend}; the first step takes minutes"


def _checkpoints(job: ResolvedJob) -> str:
    settings = job.config.checkpoint
    if not settings.enable:
        return "none are saved (checkpoint.enable = false)"
    folder = settings.folder if is_address(settings.folder) else Path(job.config.job.dump_folder) / settings.folder
    if settings.load_only:
        return f"one is read in {folder}, none are saved (checkpoint.load_only = true)"
    seconds = f" or {settings.interval_seconds:g} seconds" if settings.interval_seconds else ""
    hf = ", which is also a Hugging Face folder" if settings.last_save_in_hf else ""
    last = "the last one" + " (its weights alone)" * settings.last_save_model_only
    return f"every {settings.interval:,} steps{seconds} and after {last}{hf}, in {folder}"


def _memory(job: ResolvedJob) -> str:
    memory = rank_memory(job)
    return f"about {size_words(memory.total)} a rank at its peak, beside PyTorch's own: {memory.words()}"
