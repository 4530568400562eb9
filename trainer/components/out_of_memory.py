"""Out of memory: name the settings that need less memory in the error."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer.config.errors import first_line
from trainer.job.degrees import divisors
from trainer.job.loss import saves_memory, why_no_chunks
from trainer.job.pipeline_stages import layers_of_stages
from trainer.job.record import ResolvedJob
from trainer.job.transforms import least_offloadable, why_no_parts

Savers = tuple[tuple[bool, str], ...]
"""Whether each setting is not at its limit yet, and the setting with its effect."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a GPU or in host memory.

    Args:
        error: The error.
    """
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def out_of_memory_explained(job: ResolvedJob) -> Iterator[None]:
    """Add the settings that need less memory to an error from inside, if memory of the GPU or the host is full.

    Such an error becomes a torch.OutOfMemoryError with its first line and the settings. Other errors pass unchanged.

    Args:
        job: The resolved job.

    Yields:
        None.

    Raises:
        torch.OutOfMemoryError: Memory is full.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        settings = "\n  ".join(memory_savers(job))
        raise torch.OutOfMemoryError(
            f"{first_line(error)}\nSettings that need less memory, the cheapest first:\n  {settings}"
        ) from error


def memory_savers(job: ResolvedJob) -> list[str]:
    """Return settings that are not at their limit yet, the cheapest first, each as `key = value: effect`.

    Args:
        job: The resolved job.
    """
    savers = (
        *_savers_on_these_ranks(job),
        *_activation_savers(job),
        *_savers_of_last_resort(job),
    )
    return [words for saves, words in savers if saves]


def _savers_on_these_ranks(job: ResolvedJob) -> Savers:
    """Return settings that keep the step and the number of ranks, each as (whether it applies, words)."""
    config = job.config
    degrees = job.degrees
    training = config.training
    parallelism = config.parallelism
    is_float32 = training.mixed_precision_param == training.dtype == "float32"
    chunks = (
        job.task.name == "tokens"
        and not job.loss_chunk_tokens
        and not why_no_chunks(config, degrees)
        and saves_memory(job.model, job.tokens_of_a_pass)
    )
    replicas = degrees.dp_replicate
    return (
        (
            is_float32 and job.device_type == "cuda",
            'training.mixed_precision_param = "auto": activations in bfloat16',
        ),
        (degrees.pp == 1 and training.local_batch_size > 1, _smaller_batch(job)),
        (
            degrees.pp > 1 and parallelism.pipeline_parallel_microbatch_size > 1,
            "parallelism.pipeline_parallel_microbatch_size = 1: fewer sequences at a time, the same step",
        ),
        (
            parallelism.fsdp_reshard_after_forward == "never",
            'parallelism.fsdp_reshard_after_forward = "default": parameters of one layer at a time',
        ),
        (
            degrees.tp > 1 and parallelism.disable_loss_parallel,
            "parallelism.disable_loss_parallel = false: logits stay cut over the vocabulary",
        ),
        (chunks, "training.loss_chunk_tokens = 2048: the logits of 2048 tokens at a time"),
        (
            replicas > 1,
            f"parallelism.data_parallel_shard_degree = {degrees.dp_shard * replicas} with "
            f"parallelism.data_parallel_replicate_degree = 1: one copy of the parameters instead of {replicas}",
        ),
    )


def _smaller_batch(job: ResolvedJob) -> str:
    """Return the setting that gives the step more micro-batches."""
    training = job.config.training
    size = training.local_batch_size
    # a divisor keeps the sequences of a step
    fewer = divisors(size)[-2:][0]
    total = ""
    if training.global_batch_size == -1:
        total = f" with training.global_batch_size = {size * job.degrees.dp}"
    return f"training.local_batch_size = {fewer}{total}: the same step in more micro-batches"


def _savers_of_last_resort(job: ResolvedJob) -> Savers:
    """Return settings that cost much time, change the step or need more ranks, each as (whether it applies, words)."""
    training = job.config.training
    degrees = job.degrees
    pieces = degrees.cp * degrees.tp
    shorter = max(training.seq_len // 2 // pieces, 1) * pieces
    doubled = f"on {degrees.world_size * 2} ranks"
    return (
        (
            not training.enable_cpu_offload
            and job.device_type == "cuda"
            and degrees.dp_replicate == 1,
            "training.enable_cpu_offload = true: parameters and optimizer state in host memory",
        ),
        (training.seq_len > pieces, f"training.seq_len = {shorter}: shorter sequences"),
        (
            True,
            f"parallelism.data_parallel_shard_degree = {degrees.dp_shard * 2} {doubled}: half the parameters on each",
        ),
        (
            training.seq_len >= 2 * pieces,
            f"parallelism.context_parallel_degree = {degrees.cp * 2} {doubled}: half the activations on each",
        ),
    )


def _activation_savers(job: ResolvedJob) -> Savers:
    """Return settings that keep fewer activations on the device, each as (whether it applies, words)."""
    activations = job.config.activation_checkpoint
    compilation = job.compilation
    splits_backward = compilation.splits_backward and not compilation.chooses_recomputation
    recomputes = activations.mode != "none" and job.task.name == "tokens"
    return (
        (
            activations.mode == "none" and not splits_backward,
            'activation_checkpoint.mode = "selective": keep only the outputs that are expensive to compute',
        ),
        (
            activations.mode != "full" and not splits_backward,
            'activation_checkpoint.mode = "full": keep only the input of each layer, for a third more FLOPs',
        ),
        (
            recomputes
            and activations.offload == "none"
            and least_offloadable(activations, layers_of_stages(job.pipeline, job.model))
            is None,
            'activation_checkpoint.offload = "inputs": the inputs of layers wait in host memory',
        ),
        (
            recomputes
            and not activations.mlp_chunk_tokens
            and why_no_parts(job.config, compilation) is None,
            "activation_checkpoint.mlp_chunk_tokens = 8192: feed-forward networks on 8192 tokens at a time",
        ),
    )
