"""Check the table [validation]. Torch-free."""

from collections.abc import Callable
from dataclasses import replace

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import JobConfig
from trainer.data.settings import validation_data
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
        _in_validation(lambda: check_batch(replace(config, training=as_training), degrees))
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
    if config.validation.enable:
        _in_validation(lambda: check_data(validation_data(config)))


def _in_validation(check: Callable[[], None]) -> None:
    """Run a check of training's keys, whose errors name those of validation."""
    try:
        check()
    except ConfigError as error:
        text = str(error)
        for name in ("dataset_path", "dataset", "seq_len"):
            text = text.replace(f"training.{name}", f"validation.{name}")
        raise (MissingFile if isinstance(error, MissingFile) else ConfigError)(text) from None
