"""Decide whether the loss of tokens is computed in chunks. Torch-free."""

from trainer.config.errors import ConfigError
from trainer.config.schema import OUTPUT_IN_HIGH_PRECISION, WITHOUT_GATHERED_LOGITS, JobConfig
from trainer.families.args import DecoderArgs
from trainer.job.degrees import Degrees

LARGE_VOCABULARY = 32_000
"""Above so many tokens the logits are a large part of a rank's memory."""
CHUNK_BYTES = 2**30
"""Of `auto`: float32 logits of a chunk on a rank."""
CHUNK_TOKENS = 4096
"""Of `auto`, at most. Each chunk reads and writes the gradient of the whole weight: shorter ones are slower."""


def why_no_chunks(config: JobConfig, degrees: Degrees) -> str | None:
    """Return why all logits must exist at once; None: they need not."""
    conditions = (WITHOUT_GATHERED_LOGITS, OUTPUT_IN_HIGH_PRECISION)
    return next(
        (
            condition.otherwise
            for condition in conditions
            if not condition.holds(config, degrees)
        ),
        None,
    )


def saves_memory(model: DecoderArgs, tokens: int) -> bool:
    """Return whether all logits of so many tokens take more than those of a chunk with the gradient of the weight.

    In half precision a logit takes 8 bytes without chunks, and 6 in a chunk, as does an element of the gradient.
    """
    return 8 * tokens > 6 * (min(tokens, CHUNK_TOKENS) + model.dim)


def chunk_tokens(vocabulary: int) -> int:
    """Return the tokens of a chunk of `auto`, a multiple of 128; vocabulary: rows of the output's weight on a rank."""
    return min(max(CHUNK_BYTES // (4 * vocabulary) // 128, 1) * 128, CHUNK_TOKENS)


def loss_chunk(
    config: JobConfig, model: DecoderArgs, degrees: Degrees, tokens: int
) -> tuple[int, str]:
    """Return the tokens of a chunk of the loss, 0 for all logits at once, and the reason of `auto`.

    tokens: of one forward of a rank. The reason is empty if the configuration has a number.

    Raises:
        ConfigError: training.z_loss with logits that are cut over ranks and exist at once.
    """
    found, reason = _loss_chunk(config, model, degrees, tokens)
    if (
        config.training.z_loss
        and not found
        and degrees.tp > 1
        and not config.parallelism.disable_loss_parallel
    ):
        fits = chunk_tokens(model.linear_shapes(degrees.tp)["output"][0])
        raise ConfigError(
            f"training.z_loss = {config.training.z_loss} needs the loss in chunks where "
            f"parallelism.tensor_parallel_degree = {degrees.tp} divides the vocabulary; use training.loss_chunk_tokens "
            f"= {fits}, or parallelism.disable_loss_parallel = true"
        )
    return found, reason


def _loss_chunk(
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
