"""The data sets that a job names: their settings, what their first start makes, and the opened data. Torch-free."""

import os
from collections.abc import Sequence
from contextlib import suppress

from trainer.config.data import CONVERSATIONS
from trainer.config.errors import MissingFile
from trainer.config.schema import JobConfig
from trainer.data.data_set import DataSet
from trainer.data.mixture import Mixture
from trainer.data.sources.files import DataKeys, cache_folder
from trainer.data.sources.registry import DataSettings, files_of, source_of
from trainer.data.text_data import TextData
from trainer.data.token_files.catalog import open_documents
from trainer.data.token_files.made import described
from trainer.data.whole_stream import TooLong


def training_data(config: JobConfig) -> list[DataSettings]:
    """Return the data sets that a job trains on: one, or the sources of a mixture."""
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
    """Return the data set that the loss is validated on."""
    keys = DataKeys("validation.dataset", "validation.dataset_path")
    source = config.validation.source(config.training)
    chat = config.chat
    return DataSettings.of(*source, config.model, config.training, chat=chat, keys=keys)


def all_data(config: JobConfig) -> list[DataSettings]:
    """Return the data sets that a job reads."""
    if config.task != "tokens":
        return []
    return [
        *training_data(config),
        *([validation_data(config)] if config.validation.enable else []),
    ]


def first_start(config: JobConfig) -> list[str]:
    """Return for each data set of text on this machine what its first start makes, and where."""
    found = []
    for settings in all_data(config):
        with suppress(MissingFile):
            source = source_of(settings)
            if not (source.token_files or source.iterable):
                what = described(settings, sum(map(os.path.getsize, files_of(settings))))
                found.append(
                    f"the first start makes token files of {what} in {cache_folder()}; later ones read them"
                )
    return list(dict.fromkeys(found))


def open_text(
    settings: DataSettings, packing: str | None = None, catalog: str | None = None
) -> DataSet:
    """Return a data set. packing: None: that of its kind; catalog: as of `open_documents`, and what is raised, too."""
    if source_of(settings).iterable:
        from trainer.data.iterable_data import IterableData

        return IterableData(settings, packing or "concatenate")
    chats = None
    source = open_documents(settings, catalog)
    if settings.dataset == "preferences":
        chats = TooLong(drops=True, what="pairs longer than a sequence")
    elif settings.dataset in CONVERSATIONS:
        chats = TooLong(drops=settings.chat.too_long == "drop")
    return TextData(source, packing or ("best_fit" if chats else "concatenate"), chats)


def open_training_data(
    config: JobConfig, catalogs: Sequence[str | None] | None = None
) -> DataSet:
    """Return the data that a job trains on. catalogs: one for each of `training_data`; it raises as `open_text`."""
    settings = training_data(config)
    given = zip(settings, catalogs or [None] * len(settings), strict=True)
    parts = [open_text(one, config.training.packing, catalog) for one, catalog in given]
    names = config.mixture.names
    return (
        Mixture(dict(zip(names, parts, strict=True)), config.mixture.weights)
        if names
        else parts[0]
    )
