"""Check sequences in chunks on one device. Torch-free."""

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.families.args import ModelArgs
from trainer.job.degrees import Degrees


def check_chunks(config: JobConfig, model: ModelArgs, degrees: Degrees) -> None:
    """Check `training.sequence_chunks` against the length, the model and the ranks.

    Raises:
        ConfigError: more chunks than tokens, or a feature that chunks do not have.
    """
    chunks, tp = config.training.sequence_chunks, degrees.tp
    most = config.training.seq_len // tp
    if chunks == 1:
        return
    if chunks > most:
        per_rank = f" / parallelism.tensor_parallel_degree = {tp}" if tp > 1 else ""
        raise ConfigError(
            f"training.sequence_chunks = {chunks} is more than training.seq_len = {config.training.seq_len}{per_rank}; "
            f"use at most {most}"
        )
    for name, degree in (("context", degrees.cp), ("pipeline", degrees.pp)):
        if degree > 1:
            raise ConfigError(
                f"training.sequence_chunks = {chunks} with parallelism.{name}_parallel_degree = {degree} is not "
                "handled; use degree 1, and FSDP, HSDP or TP over the ranks, or leave the chunks out"
            )
    if kernel := getattr(model, "short_conv_kernel", 0):
        raise ConfigError(
            f"training.sequence_chunks = {chunks} does not work with model.short_conv_kernel = {kernel}, whose last "
            "tokens of a chunk are not kept for the next one; use sequence_chunks = 1, or context parallelism"
        )
