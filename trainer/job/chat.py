"""Check that conversations can be rendered: that there is a chat template, and that it fits the first line."""

import json
from contextlib import suppress

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import JobConfig
from trainer.data.chat import plain_text
from trainer.data.chat_template import find_template
from trainer.data.datasets import first_document


def check_chat(config: JobConfig) -> None:
    """Check the chat template with the first conversation of each data set.

    Raises:
        ConfigError: a template that is missing or damaged, or does not fit the conversation; a packing that cuts them.
    """
    settings, training = config.validation, config.training
    if training.dataset == "chat" and training.packing == "concatenate":
        raise ConfigError(
            "training.packing = 'concatenate' would cut conversations of training.dataset = 'chat'; use 'best_fit' or "
            "'pad', or leave it out"
        )
    sources = [(training.dataset, path) for path in config.mixture.paths or (training.dataset_path,)]
    if settings.enable:
        sources.append(settings.source(training))
        if settings.source(training)[0] == "chat" and not config.masks_documents:
            raise ConfigError(
                "validation.dataset = 'chat' needs training.attention_mask = 'document', so that conversations in one "
                "sequence do not see each other; set it, or train on 'chat' as well"
            )
    paths = [path for name, path in sources if name == "chat"]
    template = find_template(config.model.tokenizer_file, config.model.chat_template) if paths else None
    for path in paths:
        with suppress(MissingFile):  # reported by the checks of data
            found = json.loads(first_document("chat", path))
            if template is None:
                plain_text(found)
            else:
                template.render(found)
