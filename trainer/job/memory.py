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
    floor = memory.tables if job.config.training.enable_cpu_offload else memory.total
    if floor > limit:
        has = f"it has {size_words(limit)}" if available else "no device has that"
        training = job.config.training
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
    modules = _modules_of(job, pp_rank)
    adapters = _by_module(adapter_sizes(job.config, model, degrees.tp))
    trained_whole = whole_sizes(job.config, model, degrees.tp)
    shapes = model.linear_shapes(degrees.tp)
    linear_sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    sizes = _by_module(linear_sizes) | _embedding_sizes(model, degrees.tp)
    shards = degrees.dp_shard * degrees.cp

    def share(sizes: dict[str, int], ranks: int = shards) -> int:
        """Return one rank's share of the sizes of the stage's modules."""
        return math.ceil(sum(sizes.get(name, 0) for name in modules) / ranks)

    # Weights of a rank's experts in one layer, which its `efsdp` ranks divide.
    sparse = len({*layers_of(modules)} & {*expert_layers(model)})
    local = share(sizes)
    if (experts := experts_of(model)) is not None:
        local += sparse * math.ceil(
            experts.number // degrees.ep * experts.weights(model.dim) / degrees.efsdp
        )
    quantizes = job.config.lora.quantizes
    packed = share(_by_module({name: linear_sizes[name] for name in filter(quantizes, shapes)}))
    added = share(adapters)
    trained = added + share(trained_whole) if adapters else local
    moments = 2 * trained
    if job.config.optimizer.name == "Muon":  # has one moment of a matrix
        matrices = matrix_sizes(model, degrees.tp)
        expert_matrices = {name: size for name, size in matrices.items() if ".experts." in name}
        dense = {name: size for name, size in matrices.items() if name not in expert_matrices}
        ranks = (degrees.ep or 1) * degrees.efsdp
        moments -= share(_by_module(dense)) + share(_by_module(expert_matrices), ranks)
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
    channels = {
        "tok_embeddings": 0 if model.tie_embeddings else model.dim,
        "layer_embeddings": getattr(model, "layer_channels", 0),
    }
    return {name: number * model.vocab_size // tp for name, number in channels.items()}


def _modules_of(job: ResolvedJob, pp_rank: int) -> tuple[str, ...]:
    """Return the names of the modules of a pipeline rank, of all of its stages; all modules without a pipeline."""
    if job.pipeline is None:
        return job.model.module_names()
    stages = job.pipeline.stages_of(pp_rank)
    return tuple(name for stage in stages for name in job.pipeline.stages[stage])


def matrix_sizes(model: ModelArgs, tp: int = 1) -> dict[str, int]:
    """Return the number of parameters of each weight that Muon updates, by name. Stacked experts are one weight.

    The weights are the same that `models/matrices.py` finds in a decoder.

    Args:
        model: The arguments of the model.
        tp: The tensor-parallel degree. Sizes are of one tensor-parallel rank; only experts count whole.
    """
    gates = {"gate", "shared_gate", *getattr(getattr(model, "linear", None), "gates", ())}
    names = dict(weight_shapes(model, tp))
    if (latent := getattr(model, "latent", None)) is not None:
        up = latent.up_projection(model.n_heads) // tp
        names |= {
            name.replace("wkv_a", "wkv_b"): (up,) for name in names if name.endswith(".wkv_a")
        }
    layers = {name: size for name, size in names.items() if name != "output"}
    return {
        name: math.prod(size)
        for name, size in layers.items()
        if name.rpartition(".")[2] not in gates
    }


def _by_module(sizes: dict[str, int]) -> dict[str, int]:
    """Return the sizes of linear modules, by name, summed over each module that a pipeline can place."""
    sums = {}
    for name, size in sizes.items():
        module = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name
        sums[module] = sums.get(module, 0) + size
    return sums


def host_memory(job: ResolvedJob) -> int:
    """Return the bytes of page-locked host memory for offloaded activations, on the rank with most; 0 without offload.

    Args:
        job: The resolved job.
    """
    stages = layers_of_stages(job.pipeline, job.model)
    numbers = [len(job.config.activation_checkpoint.offloaded(layers)) for layers in stages]
    own = [[0]] if job.pipeline is None else map(job.pipeline.stages_of, range(job.degrees.pp))
    most = max(sum(numbers[stage] for stage in stages_of_rank) for stages_of_rank in own)
    model = job.model
    itemsize = ITEMSIZE[job.compute_dtype]
    token_bytes = model.dim * itemsize
    if job.config.activation_checkpoint.offload == "inputs+attention":  # output and log-sum-exp
        token_bytes += model.n_heads * (
            getattr(model, "value_dim", model.head_dim) * itemsize + max(itemsize, 4)
        )
    # micro-batches that wait for their backward
    passes = 1 if job.pipeline is None else job.pipeline.micro_batches
    if passes > 1 and job.pipeline.schedule not in ("GPipe", "LoopedBFS"):
        passes = min(passes, job.degrees.pp)
    return passes * job.tokens_of_a_pass * token_bytes * most // job.degrees.tp
