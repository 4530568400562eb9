"""The data sets of a job. Torch-free."""

import os
from contextlib import suppress

from trainer.config.errors import MissingFile
from trainer.config.schema import JobConfig
from trainer.data.sources.files import DataKeys, cache_folder
from trainer.data.sources.registry import DataSettings, files_of, source_of
from trainer.data.token_files.made import described


def training_data(config: JobConfig) -> list[DataSettings]:
    """Return the data sets that a job trains on: one, or the sources of a mixture."""
    training = config.training
    paths, keys = (training.dataset_path,), DataKeys()
    if config.mixture.names:
        paths, keys = config.mixture.paths, DataKeys(path="mixture.paths")
    return [
        DataSettings.of(training.dataset, path, config.model, training, chat=config.chat, keys=keys) for path in paths
    ]


def validation_data(config: JobConfig) -> DataSettings:
    """Return the data set that the loss is validated on."""
    keys = DataKeys("validation.dataset", "validation.dataset_path")
    source, chat = config.validation.source(config.training), config.chat
    return DataSettings.of(*source, config.model, config.training, chat=chat, keys=keys)


def all_data(config: JobConfig) -> list[DataSettings]:
    """Return the data sets that a job reads."""
    if config.task != "tokens":
        return []
    return [*training_data(config), *([validation_data(config)] if config.validation.enable else [])]


def first_start(config: JobConfig) -> list[str]:
    """Return for each data set of text on this machine what its first start makes, and where."""
    found = []
    for settings in all_data(config):
        with suppress(MissingFile):
            source = source_of(settings)
            if not (source.token_files or source.iterable):
                what = described(settings, sum(map(os.path.getsize, files_of(settings))))
                found.append(f"the first start makes token files of {what} in {cache_folder()}; later ones read them")
    return list(dict.fromkeys(found))
