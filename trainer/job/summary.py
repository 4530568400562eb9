"""The decisions of a job in words, each with its reason: for `lct check` and the start of a run. Torch-free."""

import math
from pathlib import Path

from trainer.config.errors import MissingFile
from trainer.config.values import in_millions
from trainer.config.writable import is_address
from trainer.families.registry import base_weights
from trainer.job.lora import adapter_sizes
from trainer.job.memory import matrix_sizes
from trainer.job.record import ResolvedJob, size_words
from trainer.runtime.console import TOPIC, line_width, paragraphs
from trainer.runtime.dump_folder import TENSORBOARD
from trainer.stores.folder import checkpoint_folder, step_to_load


def summary(job: ResolvedJob, width: int | None = None) -> str:
    """Return one paragraph for each decision. Topics that the job lacks are left out.

    Args:
        job: The resolved job.
        width: Most characters of a line. None: the width of the console.
    """
    task_topics = dict(job.task.describe(job))
    topics = {
        "model": _model(job),
        "weights": _weights(job),
        "data": task_topics.pop("data"),
        "step": _step(job),
        "mesh": _mesh(job),
        **task_topics,
        "optimizer": _optimizer(job),
        "schedule": _schedule(job),
        "precision": _precision(job),
        "recomputed": _recomputed(job),
        "compiled": _compiled(job),
        "validation": _validation(job),
        "metrics": _metrics(job),
        "checkpoints": _checkpoints(job),
        "memory": _memory(job),
    }
    return paragraphs(topics.items(), width or line_width())


def closing(job: ResolvedJob, *, checkpoint: object, program: str) -> str:
    """Return where a finished run has written its results, and which command to run next.

    Args:
        job: The resolved job.
        checkpoint: The checkpoint of the last step, None if there is none.
        program: How the user calls `lct`.
    """
    folder = Path(job.config.job.dump_folder)
    metrics = job.config.metrics
    lines = [f"{'metrics':{TOPIC}}{folder / 'metrics.jsonl'}"]
    if metrics.enable_tensorboard:
        lines.append(f"{'curves':{TOPIC}}tensorboard --logdir {folder / TENSORBOARD}")
    if checkpoint is None:
        lines.append(f"{'weights':{TOPIC}}not saved; --checkpoint.enable saves them")
    else:
        lines.append(f"{'weights':{TOPIC}}{checkpoint}")
        ours = "lct "
        command = job.task.next_command(job.config).format(folder)
        if command.startswith(ours):
            command = f"{program} {command.removeprefix(ours)}"
        lines.append(f"{'next':{TOPIC}}{command}")
        if not job.config.checkpoint.last_save_model_only:
            lines.append(
                f"{'':{TOPIC}}the same command with a larger --training.steps trains on"
            )
    return "\n".join(lines)


def _model(job: ResolvedJob) -> str:
    model = job.model
    text = (
        f"{job.config.model.name} {job.config.model.flavor}: {model.n_params():,} parameters, "
        f"{model.words()}"
    )
    if adapters := sum(adapter_sizes(job.config, model).values()):
        lora = job.config.lora
        where = ", ".join(lora.modules) or "all linear modules of layers"
        kind = "LoRA" if lora.quantize == "none" else "QLoRA"
        text += (
            f"; trained are {adapters:,} of adapters of rank {lora.rank} on {where} ({kind})"
        )
        text += f", and {' and '.join(lora.whole)} whole" * bool(lora.whole)
    return text


def _weights(job: ResolvedJob) -> str:
    config = job.config
    try:
        step = step_to_load(config) if config.checkpoint.enable else None
    except MissingFile:  # the check is for machines that reach the store
        return f"of the latest step in {checkpoint_folder(config)}, if it holds one"
    if step is not None and not config.lora.rank:
        return f"of step {step:,} in {checkpoint_folder(config)}"
    if (initial := config.checkpoint.initial_load_path) is not None:
        base = base_weights(config)
        adapters = ", adapters new" if base == initial else f", adapters of {initial}"
        if step is not None:
            adapters = f", adapters of step {step:,} in {checkpoint_folder(config)}"
        return f"of {base}{adapters * bool(config.lora.rank)}"
    flavor = config.model.flavor
    sizes = f"; {flavor} gives the sizes alone: model.path = {flavor!r} takes its weights, too"
    return f"random, seed {config.training.seed}{sizes * (config.model.folder is not None)}"


def _step(job: ResolvedJob) -> str:
    training = job.config.training
    sequences = job.sequences_per_step
    tokens = sequences * job.positions
    task = job.task
    balanced = ", documents assigned for equal work" * job.balances
    return (
        f"{tokens:,} {task.positions}: {sequences} {task.sample}s of {job.positions:,} = "
        f"{job.micro_batches} micro-batch{'es' * (job.micro_batches > 1)} x "
        f"{training.local_batch_size} {task.sample}{'s' * (training.local_batch_size > 1)} x "
        f"{job.degrees.dp} data-parallel "
        f"rank{'s' * (job.degrees.dp > 1)}{balanced}; {training.steps:,} steps are "
        f"{in_millions(training.steps * tokens)} {task.positions}"
    )


def _mesh(job: ResolvedJob) -> str:
    degrees = job.degrees
    device = {"cuda": "GPU", "cpu": "CPU rank"}[job.device_type]
    shards = degrees.dp_shard * degrees.cp
    replicas = degrees.dp_replicate
    if degrees.world_size == 1:
        return f"one {device}"
    shared = "domain" if degrees.domain else "cp"
    whose = f"dp_shard x {shared}" if degrees.dp_shard > 1 and degrees.cp > 1 else shared
    whose = whose if degrees.cp > 1 else "dp_shard"
    parts = [f"{degrees.text()} = {degrees.world_size} {device}s"]
    if shards > 1:
        parts.append(f"{whose} = {shards} ranks shard parameters and optimizer (FSDP)")
    if replicas > 1:
        copied = "them (HSDP)" if shards > 1 else "the parameters (DDP)"
        parts.append(f"{replicas} copies of {copied}")
    return "; ".join(parts)


def _optimizer(job: ResolvedJob) -> str:
    """Return which optimizer updates which parameters at which rate, the weight decay, and the groups by name."""
    settings = job.config.optimizer
    muon = job.config.muon
    model = job.model
    texts = [f"{settings.name}, rate {settings.lr:g}"]
    if settings.name == "Muon":
        rate = settings.lr if muon.lr is None else muon.lr
        matrices, others = "matrices", "the rest"
        if hasattr(model, "linear_shapes"):
            sizes = matrix_sizes(model)
            kinds = dict.fromkeys(name.partition(".")[2].partition(".")[2] for name in sizes)
            number = sum(sizes.values())
            matrices = (
                f"{number:,} parameters of layers ({', '.join(kinds)})"
                + ", each head apart" * muon.per_head
            )
            others = f"the other {model.n_params() - number:,}"
        products = (
            "float64"
            if job.config.training.dtype == "float64"
            else muon.dtype_on(job.device_type)
        )
        texts = [
            f"Muon, rate {rate:g}, for {matrices}, products in {products}",
            f"AdamW, rate {settings.lr:g}, for {others}",
        ]
    texts.append(f"weight decay {settings.weight_decay:g}")
    if math.isfinite(job.config.training.max_norm):
        texts.append(f"gradients scaled down to a norm of {job.config.training.max_norm:g}")
    return "; ".join([*texts, *(f"by name: {group}" for group in settings.groups)])


def _schedule(job: ResolvedJob) -> str:
    settings = job.config.lr_scheduler
    total = settings.length(job.config.training.steps)
    parts = []
    if settings.warmup_steps:
        parts.append(f"rises over {settings.warmup_steps:,} steps")
    decay = settings.decay_steps(total)
    if decay > 0:
        parts.append(
            f"falls to {settings.min_lr_factor:g} of it over the last {decay:,}, {settings.decay_type}"
        )
    return f"the rate {', '.join(parts) or 'is constant'}"


def _validation(job: ResolvedJob) -> str:
    settings = job.config.validation
    if not job.validates:
        return ""
    dataset = settings.dataset or job.config.training.dataset
    how_many = f"{settings.sequences:,} sequences" if settings.sequences else "all sequences"
    return f"every {settings.freq:,} steps, on {how_many} of {dataset}"


def _metrics(job: ResolvedJob) -> str:
    settings = job.config.metrics
    places = (
        "metrics.jsonl"
        + " and TensorBoard" * settings.enable_tensorboard
        + " and Weights & Biases" * settings.enable_wandb
    )
    return (
        f"every {settings.log_freq:,} steps to {places}"
        if settings.log_freq > 1
        else f"each step to {places}"
    )


def _precision(job: ResolvedJob) -> str:
    training = job.config.training
    degrees = job.degrees
    why = "as set"
    if job.user_config.training.mixed_precision_param == "auto":
        why = (
            "auto: bfloat16 on GPUs"
            if job.device_type == "cuda"
            else "auto: the stored type on CPUs"
        )
    stored = training.dtype
    moments = job.config.state_dtype
    text = (
        f"parameters and optimizer in {stored}"
        if stored == moments
        else f"parameters in {stored}, moments in {moments}"
    )
    text += f", rounded {job.config.optimizer.rounding}" * ("bfloat16" in (stored, moments))
    text += (
        ", on the host" * training.enable_cpu_offload
        + ", updated during the backward" * training.early_update
    )
    text += f", computing in {job.compute_dtype} ({why})"
    if degrees.dp * degrees.cp > 1:
        text += f", gradients summed in {'float64' if training.dtype == 'float64' else training.mixed_precision_reduce}"
    return text + (
        f"; float8 products, {job.config.float8.recipe_name}"
        if job.config.float8.enable
        else ""
    )


def _recomputed(job: ResolvedJob) -> str:
    settings = job.config.activation_checkpoint
    if settings.mode == "selective":
        if every := settings.whole_layers:
            layers = {1: "every layer", 2: "every second layer"}.get(
                every, f"one in {every} layers"
            )
            return f"activations of {layers} (selective)"
        return "activations except attention and every second matrix product (selective, by operator)"
    return {
        "none": 'nothing: all activations are kept (activation_checkpoint.mode = "none")',
        "full": "all activations except the input of each layer (full)",
        "memory_budget": f"what the compiler chooses, to keep {settings.memory_budget:.0%} of the activations",
    }[settings.mode]


def _compiled(job: ResolvedJob) -> str:
    compilation = job.compilation
    if not compilation.any:
        return "nothing (compile.enable = false)"
    parts = ["each layer"] * compilation.model + ["the loss"] * compilation.loss
    return f"{' and '.join(parts)}, by {compilation.backend}; the first step takes minutes"


def _checkpoints(job: ResolvedJob) -> str:
    settings = job.config.checkpoint
    if not settings.enable:
        return "none are saved (checkpoint.enable = false)"
    folder = (
        settings.folder
        if is_address(settings.folder)
        else Path(job.config.job.dump_folder) / settings.folder
    )
    if settings.load_only:
        return f"one is read in {folder}, none are saved (checkpoint.load_only = true)"
    seconds = f" or {settings.interval_seconds:g} seconds" if settings.interval_seconds else ""
    hf = ", which is also a Hugging Face folder" if settings.last_save_in_hf else ""
    last = "the last one" + " (its weights alone)" * settings.last_save_model_only
    return f"every {settings.interval:,} steps{seconds} and after {last}{hf}, in {folder}"


def _memory(job: ResolvedJob) -> str:
    memory = job.task.memory(job)
    return (
        f"{size_words(memory.total)} a rank from step to step: {memory.describe()}; `lct check` and `lct estimate` "
        "predict the peak"
    )
