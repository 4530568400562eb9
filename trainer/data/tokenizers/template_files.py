"""The search for a chat template: in a file, among the registered ones, or in the tokenizer's folder."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError, MissingFile
from trainer.config.registry import Registry
from trainer.config.schema import Chat
from trainer.data.tokenizers.chat_template import ChatTemplate
from trainer.data.tokenizers.tokenizer import Tokenizer, special_names
from trainer.hugging_face.config_json import read_settings
from trainer.hugging_face.folder import HFFolder

NO_TEMPLATE = "none"
TEMPLATES: Registry[str] = Registry("chat template")
"""Templates that packages add, as Jinja text; see `register_chat_template`."""
_DEFAULT = Chat()
_SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def find_template(
    tokenizer_path: str,
    chat_template: str | None,
    chat: Chat = _DEFAULT,
    ends: Mapping[str, str] | None = None,
) -> ChatTemplate | None:
    """Return the chat template of a tokenizer, None if there is none.

    Args:
        tokenizer_path: The file or folder of the tokenizer.
        chat_template: A Jinja file, a registered name, or "none"; None for the template of the tokenizer's folder.
        chat: The table [chat].
        ends: `bos_token` and `eos_token` of a tokenizer without `tokenizer_config.json`.

    Raises:
        ConfigError: A file is damaged.
        MissingFile: The file of `chat_template` cannot be read.
    """
    if chat_template == NO_TEMPLATE:
        return None
    tokenizer = Path(tokenizer_path)
    folders = [tokenizer if tokenizer.is_dir() else tokenizer.absolute().parent]
    # Meta's tokenizer is in a folder inside the model's folder
    if not tokenizer.is_dir() and folders[0].name == "original":
        folders.append(folders[0].parent)
    settings = [(folder, read_settings(folder / "tokenizer_config.json")) for folder in folders]
    special = next((_special_tokens(content) for _, content in settings if content), ends or {})
    made = partial(ChatTemplate, special=special, chat=chat)
    with suppress(ConfigError):  # reported when the tokenizer is opened
        made = partial(made, tokens=special_names(tokenizer_path))
    if chat_template in TEMPLATES:
        return made(TEMPLATES[chat_template], chat_template)
    if chat_template is not None:
        return made(_read(chat_template), chat_template)
    for folder, content in settings:
        source, file = _source_in(folder, content)
        if source is not None:
            return made(source, str(file))
    return None


def _read(chat_template: str) -> str:
    """Return the text of the configured file. If it cannot be read, a MissingFile is raised."""
    try:
        return Path(os.path.expanduser(chat_template)).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MissingFile(
            f"model.chat_template = {chat_template!r} cannot be read ({getattr(error, 'strerror', error)}); name "
            "a Jinja file, 'none', or leave it out for the template of the tokenizer's folder"
        ) from None


def _source_in(folder: Path, settings: Mapping[str, Any]) -> tuple[str | None, Path]:
    """Return the template of a folder, None if it has none, and the file in which the template was searched last.

    `settings` are the content of the folder's tokenizer_config.json. If chat_template.jinja cannot be read, a
    ConfigError is raised.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8"), file
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read ({error}); copy it again") from None
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = (
            entry
            for entry in source
            if isinstance(entry, dict) and entry.get("name") == "default"
        )
        source = next(named, {}).get("template")
    return source if isinstance(source, str) else None, folder / "tokenizer_config.json"


def end_ids(
    tokenizer: Tokenizer, folders: Iterable[HFFolder | None], template: ChatTemplate | None
) -> set[int]:
    """Return the ids that end a text: of the tokenizer, of `generation_config.json`, and of the template's answers.

    Ids outside the vocabulary are left out.

    Args:
        tokenizer: The tokenizer.
        folders: Hugging Face folders; None is ignored.
        template: The chat template, None without one.
    """
    ends = {tokenizer.eos_id}
    for folder in set(folders) - {None}:
        named = folder.generation.content.get("eos_token_id")
        ends |= set(named) if isinstance(named, list) else {named}
    for end in template.ends_of_answers() if template is not None else ():
        ends |= set(tokenizer.encode_with_places(end, special=True)[0].tolist())
    return {end for end in ends if type(end) is int and 0 <= end < tokenizer.vocab_size}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    entries = {name: settings.get(name) for name in _SPECIAL}
    texts = {
        name: entry.get("content") if isinstance(entry, dict) else entry
        for name, entry in entries.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}
