"""Check the table [validation]. Torch-free."""

from dataclasses import replace

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.data.sources.registry import source_of
from trainer.data.text_data import validation_data
from trainer.data.token_files.catalog import check_data
from trainer.job.degrees import Degrees
from trainer.job.training import check_batch


def check_validation(config: JobConfig, degrees: Degrees) -> list[str]:
    """Check lengths, and return notes.

    Raises:
        ConfigError: sequences longer than in training, or that cannot be divided among the ranks.
    """
    settings, training = config.validation, config.training
    if not settings.enable:
        return []
    if settings.seq_len is not None:
        if settings.seq_len > training.seq_len:
            raise ConfigError(
                f"validation.seq_len = {settings.seq_len} must be at most training.seq_len = {training.seq_len}, for "
                "which the model is made; lower it, or leave it out"
            )
        as_training = replace(training, seq_len=settings.seq_len, global_batch_size=-1)
        check_batch(replace(config, training=as_training), degrees, length_key="validation.seq_len")
    if settings.source(training) == (training.dataset, training.dataset_path):
        return [
            "validation measures the loss on the training data: name other data in validation.dataset and "
            "validation.dataset_path"
        ]
    return []


def check_validation_data(config: JobConfig) -> None:
    """Check that the validation data are there.

    Raises:
        ConfigError: see `check_source`.
    """
    if not config.validation.enable:
        return
    settings = validation_data(config)
    if source_of(settings).iterable:
        raise ConfigError(
            f"validation.dataset = {settings.dataset!r} is an iterable, and each validation must read the same "
            "documents; name a data set of files in validation.dataset"
        )
    check_data(settings)
