"""The data sets of a job. Torch-free."""

from trainer.config.schema import JobConfig
from trainer.data.sources.registry import DataSettings


def training_data(config: JobConfig) -> list[DataSettings]:
    """Return the data sets that a job trains on: one, or the sources of a mixture."""
    training = config.training
    paths = config.mixture.paths if config.mixture.names else (training.dataset_path,)
    return [DataSettings.of(training.dataset, path, config.model, training) for path in paths]


def validation_data(config: JobConfig) -> DataSettings:
    """Return the data set that the loss is validated on."""
    return DataSettings.of(*config.validation.source(config.training), config.model, config.training)
