"""Check the table [mixture], and the data sets that it names. They raise ConfigError."""

import re

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.data.sources.registry import DATASETS
from trainer.data.text_data import training_data
from trainer.data.token_files.catalog import check_data


def check_mixture(config: JobConfig) -> None:
    """Check that each source has a name, a path and a weight, and that their kind of data has files."""
    mixture, training = config.mixture, config.training
    names = list(mixture.names)
    for key in ("paths", "weights"):
        given = list(getattr(mixture, key))
        if len(given) != len(names):
            raise ConfigError(
                f"mixture.{key} = {given} lists {len(given)}, and mixture.names = {names} lists {len(names)}; give "
                "one for each source"
            )
    if not names:
        return
    wrong = next((name for name in names if not re.fullmatch(r"[\w.-]+", name) or names.count(name) > 1), None)
    if wrong is not None:
        raise ConfigError(
            f"mixture.names = {names}: {wrong!r} must be a name of letters, digits, '_', '-' and '.', of one source; "
            "write another one, such as 'web'"
        )
    if min(mixture.weights) < 0 or not sum(mixture.weights):
        raise ConfigError(
            f"mixture.weights = {list(mixture.weights)} must be at least 0, and one above 0; write shares, such as "
            "0.7 0.3 (0 leaves a source out)"
        )
    if training.dataset_path is not None:
        raise ConfigError(
            f"training.dataset_path = {training.dataset_path!r} would do nothing beside mixture.paths; leave it out"
        )
    if not has_files(training.dataset):
        raise ConfigError(
            f"training.dataset = {training.dataset!r} is no kind of data that mixture.paths can name; use 'text', "
            "'jsonl', 'tokens' or 'chat', for all sources"
        )


def check_training_data(config: JobConfig) -> None:
    """Check the data set, or each source of the mixture, see `check_data`."""
    if config.mixture.names and not has_files(config.training.dataset):
        return  # refused by `check_mixture`
    for settings in training_data(config):
        check_data(settings, config.training.data_streams)


def has_files(dataset: str) -> bool:
    """Return whether a kind of data has files, which a mixture names."""
    return dataset in DATASETS and bool(DATASETS[dataset].endings)
