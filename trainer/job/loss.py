"""Decide whether the loss of tokens is computed in chunks. Torch-free."""

from trainer.config.errors import ConfigError
from trainer.config.schema import OUTPUT_IN_HIGH_PRECISION, WITHOUT_GATHERED_LOGITS, JobConfig
from trainer.families.args import DecoderArgs
from trainer.job.degrees import Degrees

LARGE_VOCABULARY = 32_000
"""Size of a vocabulary from which on logits are a large part of a rank's memory."""
CHUNK_BYTES = 2**30
"""Bytes of float32 logits of a chunk on a rank, as `auto` chooses it."""
CHUNK_TOKENS = 4096
"""Most tokens of a chunk of `auto`. Each chunk reads and writes the gradient of the whole weight: many are slow."""


def why_no_chunks(config: JobConfig, degrees: Degrees) -> str | None:
    """Return why all logits must exist at once, as a sentence; None if they need not.

    Args:
        config: The configuration of the run.
        degrees: The degrees of parallelism.
    """
    for condition in (WITHOUT_GATHERED_LOGITS, OUTPUT_IN_HIGH_PRECISION):
        if not condition.holds(config, degrees):
            return condition.otherwise
    return None


def saves_memory(model: DecoderArgs, tokens: int) -> bool:
    """Return whether all logits take more memory than a chunk of logits with the gradient of the weight.

    In half precision a logit takes 8 bytes without chunks. In a chunk it takes 6, as does an element of the gradient.

    Args:
        model: The arguments of the model.
        tokens: Tokens of one forward of a rank.
    """
    return 8 * tokens > 6 * (min(tokens, CHUNK_TOKENS) + model.dim)


def chunk_tokens(vocabulary: int) -> int:
    """Return the tokens of a chunk that `auto` takes, a multiple of 128.

    Args:
        vocabulary: Rows of the output's weight on a rank.
    """
    return min(max(CHUNK_BYTES // (4 * vocabulary) // 128, 1) * 128, CHUNK_TOKENS)


def loss_chunk(
    config: JobConfig, model: DecoderArgs, degrees: Degrees, tokens: int
) -> tuple[int, str]:
    """Return the tokens of a chunk of the loss, and the reason of `auto`.

    Args:
        config: The configuration of the run.
        model: The arguments of the model.
        degrees: The degrees of parallelism.
        tokens: Tokens of one forward of a rank.

    Returns:
        The tokens, 0 for all logits at once; and the reason, empty if the configuration has a number.

    Raises:
        ConfigError: training.z_loss is set, and logits exist at once and are divided over ranks.
    """
    chunk, reason = _chosen_chunk(config, model, degrees, tokens)
    divided = degrees.tp > 1 and not config.parallelism.disable_loss_parallel
    if config.training.z_loss and not chunk and divided:
        rows, _ = model.linear_shapes(degrees.tp)["output"]
        raise ConfigError(
            f"training.z_loss = {config.training.z_loss} needs the loss in chunks where "
            f"parallelism.tensor_parallel_degree = {degrees.tp} divides the vocabulary; use training.loss_chunk_tokens "
            f"= {chunk_tokens(rows)}, or parallelism.disable_loss_parallel = true"
        )
    return chunk, reason


def _chosen_chunk(
    config: JobConfig, model: DecoderArgs, degrees: Degrees, tokens: int
) -> tuple[int, str]:
    if reason := why_no_chunks(config, degrees):
        return 0, reason
    configured = config.training.loss_chunk_tokens
    if configured is not None:
        return configured, ""
    vocabulary = f"auto: {model.vocab_size:,} tokens in the vocabulary"
    if model.vocab_size <= LARGE_VOCABULARY:
        return 0, f"{vocabulary} are few"
    if not saves_memory(model, tokens):
        return 0, f"auto: {tokens:,} tokens have few logits"
    return chunk_tokens(model.linear_shapes(degrees.tp)["output"][0]), vocabulary
