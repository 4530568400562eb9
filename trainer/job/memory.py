"""The bytes that one rank holds from step to step, computed exactly from sizes. Torch-free.

Activations, logits and gathered parameters come on top: `lct estimate` and `lct check` trace them. Memory that PyTorch,
NCCL and the CUDA context take themselves is not counted.
"""

import math

from trainer.config.errors import ConfigError
from trainer.config.transforms import NF4_BLOCK, NF4_BYTES
from trainer.families.args import ModelArgs, expert_layers, experts_of, rotary_channels
from trainer.job.lora import adapter_sizes, weight_shapes, whole_sizes
from trainer.job.pipeline_stages import layers_of, layers_of_stages
from trainer.job.record import ITEMSIZE, RankMemory, ResolvedJob, size_words

_LARGEST = 2**42
"""More bytes than any device has."""


def check_memory(job: ResolvedJob, available: int | None) -> None:
    """Check that the memory of a rank fits its device. With offload to the CPU, only rotary tables and batch count.

    Args:
        job: The resolved job.
        available: Bytes of the device; None if unknown: then the limit is 4 TiB, more than any device has.

    Raises:
        ConfigError: It does not fit.
    """
    memory = job.task.memory(job)
    limit = available or _LARGEST
    training = job.config.training
    floor = memory.tables if training.enable_cpu_offload else memory.total
    if floor > limit:
        has = f"it has {size_words(limit)}" if available else "no device has that"
        sample = (
            f"training.seq_len = {training.seq_len}"
            if job.task.name == "tokens"
            else f"{job.task.sample}s"
        )
        batch, shorter = "", "a shorter length"
        if training.local_batch_size > 1:
            batch = f"training.local_batch_size = {training.local_batch_size}, "
            shorter = "a smaller batch or length"
        raise ConfigError(
            f"{batch}{sample} and model.flavor = {job.config.model.flavor!r} take at "
            f"least {size_words(floor)} a rank for weights, gradients, optimizer, rotary table and batch, and {has}; "
            f"use {shorter}, a smaller model, or more ranks that shard it"
        )


def memory_of_stage(job: ResolvedJob, pp_rank: int) -> RankMemory:
    """Return the bytes of memory, without activations, of each rank at a place of the pipeline.

    Args:
        job: The resolved job.
        pp_rank: The place, from 0 to the pipeline-parallel degree - 1.
    """
    degrees = job.degrees
    training = job.config.training
    model = job.model
    stored = ITEMSIZE[training.dtype]
    modules = set(model.module_names())
    if (plan := job.pipeline) is not None:
        modules = {name for stage in plan.stages_of(pp_rank) for name in plan.stages[stage]}
    adapters = adapter_sizes(job.config, model, degrees.tp)
    shapes = model.linear_shapes(degrees.tp)
    linear_sizes = {name: math.prod(shape) for name, shape in shapes.items()}

    def share(sizes: dict[str, int], ranks: int = degrees.dp_shard * degrees.cp) -> int:
        """Return one rank's share of the sizes, by name, of the stage's modules and of modules in its layers."""
        return math.ceil(
            sum(x for name, x in sizes.items() if _module(name) in modules) / ranks
        )

    # Weights of a rank's experts in one layer, which its `efsdp` ranks divide.
    sparse = len({*layers_of(modules)} & {*expert_layers(model)})
    local = share(linear_sizes | _embedding_sizes(model, degrees.tp))
    if (experts := experts_of(model)) is not None:
        local += sparse * math.ceil(
            experts.number // degrees.ep * experts.weights(model.dim) / degrees.efsdp
        )
    quantizes = job.config.lora.quantizes
    packed = share({name: linear_sizes[name] for name in filter(quantizes, shapes)})
    added = share(adapters)
    trained = added + share(whole_sizes(job.config, model, degrees.tp)) if adapters else local
    moments = 2 * trained
    if job.config.optimizer.name == "Muon":  # has one moment of a matrix
        matrices = matrix_sizes(model, degrees.tp)
        expert_matrices = {name: size for name, size in matrices.items() if ".experts." in name}
        dense = {name: size for name, size in matrices.items() if name not in expert_matrices}
        ranks = (degrees.ep or 1) * degrees.efsdp
        moments -= share(dense) + share(expert_matrices, ranks)
    rows = training.seq_len // degrees.cp
    token_bytes = 2 * 8 * training.local_batch_size
    return RankMemory(
        weights=(local - packed + added) * stored + packed * NF4_BYTES // NF4_BLOCK,
        gradients=trained * stored,
        optimizer=moments * ITEMSIZE[job.config.state_dtype],
        tables=rows * (rotary_channels(model) * max(stored, 4) + token_bytes),
    )


def _embedding_sizes(model: ModelArgs, tp: int) -> dict[str, int]:
    """Return one rank's number of parameters of each embedding, by name; 0 if it is tied: the output counts it."""
    return {
        "tok_embeddings": 0 if model.tie_embeddings else model.dim * model.vocab_size // tp,
        "layer_embeddings": getattr(model, "layer_channels", 0) * model.vocab_size // tp,
    }


def matrix_sizes(model: ModelArgs, tp: int = 1) -> dict[str, int]:
    """Return the number of parameters of each weight that Muon updates, by name. Stacked experts are one weight.

    The weights are the same that `models/matrices.py` finds in a decoder.

    Args:
        model: The arguments of the model.
        tp: The tensor-parallel degree. Sizes are of one tensor-parallel rank; only experts count whole.
    """
    gates = {"gate", "shared_gate", *getattr(getattr(model, "linear", None), "gates", ())}
    shapes = weight_shapes(model, tp)
    shapes.pop("output", None)
    if (latent := getattr(model, "latent", None)) is not None:
        up = latent.up_projection(model.n_heads) // tp
        shapes |= {
            name.replace("wkv_a", "wkv_b"): (up,) for name in shapes if name.endswith(".wkv_a")
        }
    return {
        name: math.prod(shape)
        for name, shape in shapes.items()
        if name.rpartition(".")[2] not in gates
    }


def _module(name: str) -> str:
    """Return the name of the module, or of its layer: what a pipeline can place."""
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else name


def host_memory(job: ResolvedJob) -> int:
    """Return the bytes of page-locked host memory for offloaded activations, on the rank with most; 0 without offload.

    Args:
        job: The resolved job.
    """
    plan = job.pipeline
    model = job.model
    stages = layers_of_stages(plan, model)
    numbers = [len(job.config.activation_checkpoint.offloaded(layers)) for layers in stages]
    own = [[0]] if plan is None else map(plan.stages_of, range(job.degrees.pp))
    most = max(sum(numbers[stage] for stage in stages_of_rank) for stages_of_rank in own)
    itemsize = ITEMSIZE[job.compute_dtype]
    token_bytes = model.dim * itemsize
    if job.config.activation_checkpoint.offload == "inputs+attention":  # output and log-sum-exp
        token_bytes += model.n_heads * (
            getattr(model, "value_dim", model.head_dim) * itemsize + max(itemsize, 4)
        )
    # micro-batches that wait for their backward
    passes = 1 if plan is None else plan.micro_batches
    if passes > 1 and plan.schedule not in ("GPipe", "LoopedBFS"):
        passes = min(passes, job.degrees.pp)
    return passes * job.tokens_of_a_pass * token_bytes * most // job.degrees.tp
