"""Check the data of a run: the tables [mixture], [chat] and [validation], and their data sets. Torch-free."""

import re
import time
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from trainer.config.data import CONVERSATIONS
from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import JobConfig
from trainer.data.job_data import training_data, validation_data
from trainer.data.sources.registry import DATASETS, all_documents, source_of
from trainer.data.token_files.catalog import check_data
from trainer.data.tokenizers import chat_notes
from trainer.data.tokenizers.conversation_encoder import plain_text
from trainer.data.tokenizers.template_files import find_template
from trainer.job.degrees import Degrees
from trainer.job.training import check_batch

_FIRST = 100  # conversations of each source that `lct check` reads
_SECONDS = 3.0  # time after which it stops reading: trajectories may be long


def check_mixture(config: JobConfig) -> None:
    """Check that each source has its own name, a path and a weight, and that the kind of data has files.

    Args:
        config: The configuration of the run.

    Raises:
        ConfigError: The numbers of names, paths and weights differ. A name is invalid, or repeated. A weight is
            negative, or all are 0. `training.dataset_path` is set, too. Or `training.dataset` reads no files.
    """
    mixture = config.mixture
    training = config.training
    names = list(mixture.names)
    for key in ("paths", "weights"):
        values = list(getattr(mixture, key))
        if len(values) != len(names):
            raise ConfigError(
                f"mixture.{key} = {values} lists {len(values)}, and mixture.names = {names} lists {len(names)}; give "
                "one for each source"
            )
    if not names:
        return
    for name in names:
        if not re.fullmatch(r"[\w.-]+", name) or names.count(name) > 1:
            raise ConfigError(
                f"mixture.names = {names}: {name!r} must be a name of letters, digits, '_', '-' and '.', of one "
                "source; write another one, such as 'web'"
            )
    if min(mixture.weights) < 0 or not sum(mixture.weights):
        raise ConfigError(
            f"mixture.weights = {list(mixture.weights)} must be at least 0, and one above 0; write shares, such as "
            "0.7 0.3 (0 leaves a source out)"
        )
    if training.dataset_path is not None:
        raise ConfigError(
            f"training.dataset_path = {training.dataset_path!r} would do nothing with mixture.paths; leave it out"
        )
    if not has_files(training.dataset):
        raise ConfigError(
            f"training.dataset = {training.dataset!r} is no kind of data that mixture.paths can name; use 'text', "
            "'jsonl', 'tokens' or 'chat', for all sources"
        )


def check_training_data(config: JobConfig) -> None:
    """Check the data set, or each source of the mixture, by `check_data`.

    A mixture of data without files is not checked here, see `check_mixture`.

    Args:
        config: The configuration of the run.

    Raises:
        ConfigError: The data cannot be used.
        MissingFile: The data are not on this machine.
    """
    if config.mixture.names and not has_files(config.training.dataset):
        return  # refused by `check_mixture`
    for settings in training_data(config):
        check_data(settings, config.training.data_streams)


def has_files(dataset: str) -> bool:
    """Return whether a kind of data has files, so that a mixture can name them.

    Args:
        dataset: The value of `training.dataset`.
    """
    return dataset in DATASETS and bool(DATASETS[dataset].endings)


def check_chat(config: JobConfig) -> None:
    """Check that the chat template fits the first conversation of each data set, and that packing cuts no conversation.

    Data on the hub and missing data are not read.

    Args:
        config: The configuration of the run.

    Raises:
        ConfigError: The template refuses a conversation, packing would cut one, or conversations would see each other.
            Or `[chat]` has arguments or a date for a template, and there is none.
    """
    training = config.training
    if training.dataset in CONVERSATIONS and training.packing == "concatenate":
        raise ConfigError(
            f"training.packing = 'concatenate' would cut conversations of training.dataset = {training.dataset!r}; use "
            "'best_fit' or 'pad', or leave it out"
        )
    sources = training_data(config)
    if config.validation.enable:
        sources.append(validation_data(config))
        if sources[-1].dataset == "chat" and not config.masks_documents:
            raise ConfigError(
                "validation.dataset = 'chat' needs training.attention_mask = 'document', so that conversations in one "
                "sequence do not see each other; set it, or train on 'chat' as well"
            )
    # the first start reads the hub, and later ones need no network
    chats = [source for source in sources if source.dataset in CONVERSATIONS and not source.hub]
    template = (
        find_template(config.model.tokenizer_file, config.model.chat_template, config.chat)
        if chats
        else None
    )
    for source in chats:
        with suppress(MissingFile):  # reported by the checks of data
            conversation = next(all_documents(replace(source, skips=False)), None)
            if conversation is None:
                continue
            if template is None:
                plain_text(conversation)
                if config.chat.arguments or config.chat.date:
                    raise ConfigError(
                        "chat.arguments and chat.date are for a chat template, and there is none; leave them out, "
                        "or name a template in model.chat_template"
                    )
            else:
                template.render(conversation)


def conversation_notes(config: JobConfig) -> list[str]:
    """Return a sentence for each kind of part that the text of some conversations lacks, such as reasoning or tools.

    Only the first conversations of each source are read, for some seconds, and none of a source on the hub. A
    conversation that the start would refuse is skipped.

    Args:
        config: The configuration of the run.
    """
    notes = {}
    number = 0
    started = time.monotonic()
    for source in training_data(config):
        if source.dataset not in CONVERSATIONS or source.hub:
            continue
        encoder = source.conversation_encoder()
        conversations = filter(None, all_documents(replace(source, skips=True)))
        for conversation in islice(conversations, _FIRST):
            with suppress(ConfigError):  # the start refuses it
                chat_notes.add(notes, encoder.notes(conversation), conversation["where"]())
                number += 1
            if time.monotonic() - started > _SECONDS:
                break
    return [
        f"of the first {number:,} conversations: {sentence}"
        for sentence in chat_notes.sentences(notes)
    ]


def check_validation(config: JobConfig, degrees: Degrees) -> list[str]:
    """Check the length of validation sequences, if validation is on.

    Args:
        config: The configuration of the run.
        degrees: The degrees of parallelism.

    Returns:
        Notes for the log: one if validation reads the training data.

    Raises:
        ConfigError: The sequences are longer than in training, or the ranks cannot divide them.
    """
    settings = config.validation
    training = config.training
    if not settings.enable:
        return []
    if settings.seq_len is not None:
        if settings.seq_len > training.seq_len:
            raise ConfigError(
                f"validation.seq_len = {settings.seq_len} must be at most training.seq_len = {training.seq_len}, for "
                "which the model is made; lower it, or leave it out"
            )
        as_training = replace(training, seq_len=settings.seq_len, global_batch_size=-1)
        check_batch(
            replace(config, training=as_training), degrees, length_key="validation.seq_len"
        )
    if settings.source(training) == (training.dataset, training.dataset_path):
        return [
            "validation measures the loss on the training data: name other data in validation.dataset and "
            "validation.dataset_path"
        ]
    return []


def check_validation_data(config: JobConfig) -> None:
    """Check that the validation data exist, by `check_data`, if validation is on.

    Args:
        config: The configuration of the run.

    Raises:
        ConfigError: The data are an iterable, or cannot be used.
        MissingFile: The data are not on this machine.
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
