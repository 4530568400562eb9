"""Check that conversations can be rendered: that there is a chat template, and that it fits the first line."""

from contextlib import suppress
from dataclasses import replace

from trainer.config.data import CONVERSATIONS
from trainer.config.errors import ConfigError, MissingFile
from trainer.config.schema import JobConfig
from trainer.data.sources.registry import all_documents
from trainer.data.text_data import training_data, validation_data
from trainer.data.tokenizers.chat_template import find_template
from trainer.data.tokenizers.encoders import plain_text


def check_chat(config: JobConfig) -> None:
    """Check the chat template with the first conversation of each data set.

    Raises:
        ConfigError: a template that is missing or damaged, or does not fit the conversation; a packing that cuts them.
    """
    settings, training = config.validation, config.training
    if training.dataset in CONVERSATIONS and training.packing == "concatenate":
        raise ConfigError(
            f"training.packing = 'concatenate' would cut conversations of training.dataset = {training.dataset!r}; use "
            "'best_fit' or 'pad', or leave it out"
        )
    sources = training_data(config)
    if settings.enable:
        sources.append(validation_data(config))
        if sources[-1].dataset == "chat" and not config.masks_documents:
            raise ConfigError(
                "validation.dataset = 'chat' needs training.attention_mask = 'document', so that conversations in one "
                "sequence do not see each other; set it, or train on 'chat' as well"
            )
    chats = [source for source in sources if source.dataset in CONVERSATIONS]
    template = find_template(config.model.tokenizer_file, config.model.chat_template, config.chat) if chats else None
    for source in chats:
        with suppress(MissingFile):  # reported by the checks of data
            found = next(all_documents(replace(source, skips=False)), None)
            if found is None:
                continue
            if template is None:
                plain_text(found)
                if config.chat.arguments or config.chat.date:
                    raise ConfigError(
                        "chat.arguments and chat.date are those of a chat template, and there is none; leave them out, "
                        "or name a template in model.chat_template"
                    )
            else:
                template.render(found)
