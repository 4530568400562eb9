"""The data sets that a job names: their settings, the files of their first start, and the opened data. Torch-free."""

import os
from collections.abc import Sequence
from contextlib import suppress

from trainer.config.data import CONVERSATIONS
from trainer.config.errors import MissingFile
from trainer.config.schema import JobConfig
from trainer.data.mixture import DataSet, Mixture
from trainer.data.sources.files import DataKeys, cache_folder
from trainer.data.sources.registry import DataSettings, files_of, source_of
from trainer.data.text_data import TextData
from trainer.data.token_files.catalog import open_documents
from trainer.data.token_files.made import described
from trainer.data.whole_stream import TooLong


def training_data(config: JobConfig) -> list[DataSettings]:
    """Return the settings of the training data: one data set, or the sources of a mixture.

    Args:
        config: The configuration of the run.
    """
    training = config.training
    paths = (training.dataset_path,)
    keys = DataKeys()
    if config.mixture.names:
        paths = config.mixture.paths
        keys = DataKeys(path="mixture.paths")
    return [
        DataSettings.of(
            training.dataset, path, config.model, training, chat=config.chat, keys=keys
        )
        for path in paths
    ]


def validation_data(config: JobConfig) -> DataSettings:
    """Return the settings of the validation data.

    Args:
        config: The configuration of the run.
    """
    return DataSettings.of(
        *config.validation.source(config.training),
        config.model,
        config.training,
        chat=config.chat,
        keys=DataKeys("validation.dataset", "validation.dataset_path"),
    )


def all_data(config: JobConfig) -> list[DataSettings]:
    """Return the settings of all text data that a job reads; none for a task without text.

    Args:
        config: The configuration of the run.
    """
    if config.task != "tokens":
        return []
    validation = [validation_data(config)] if config.validation.enable else []
    return training_data(config) + validation


def first_start(config: JobConfig) -> list[str]:
    """Return a line about the token files of each data set that needs them and whose files are on this machine.

    Whether the cache already has the token files is not checked.

    Args:
        config: The configuration of the run.
    """
    lines = []
    for settings in all_data(config):
        with suppress(MissingFile):
            source = source_of(settings)
            if not (source.token_files or source.iterable):
                size = sum(map(os.path.getsize, files_of(settings)))
                lines.append(
                    f"the first start makes token files of {described(settings, size)} in {cache_folder()}; later "
                    "ones read them"
                )
    return list(dict.fromkeys(lines))


def open_text(
    settings: DataSettings, packing: str | None = None, catalog: str | None = None
) -> DataSet:
    """Open a data set. Without a catalog, make the token files that are missing.

    Args:
        settings: The settings of the data set.
        packing: The value of training.packing; None for the default of the kind of data.
        catalog: The catalog of its token files, as in `open_documents`.

    Returns:
        The data set.

    Raises:
        ConfigError: As `open_documents`.
    """
    if source_of(settings).iterable:
        from trainer.data.iterable_data import IterableData

        return IterableData(settings, packing or "concatenate")
    chats = None
    source = open_documents(settings, catalog)
    if settings.dataset == "preferences":
        chats = TooLong(drops=True, kind="pairs longer than a sequence")
    elif settings.dataset in CONVERSATIONS:
        chats = TooLong(drops=settings.chat.too_long == "drop")
    return TextData(source, packing or ("best_fit" if chats else "concatenate"), chats)


def open_training_data(
    config: JobConfig, catalogs: Sequence[str | None] | None = None
) -> DataSet:
    """Open the training data of a job.

    Args:
        config: The configuration of the run.
        catalogs: One catalog for each of `training_data`, as in `open_text`. None: no catalogs.

    Returns:
        The data set.

    Raises:
        ConfigError: As `open_text`.
    """
    settings = training_data(config)
    catalogs = catalogs or [None] * len(settings)
    packing = config.training.packing
    parts = [open_text(s, packing, c) for s, c in zip(settings, catalogs, strict=True)]
    names = config.mixture.names
    return (
        Mixture(dict(zip(names, parts, strict=True)), config.mixture.weights)
        if names
        else parts[0]
    )
