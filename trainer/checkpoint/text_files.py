"""The files of an exported folder that are about text: tokenizer, chat template, and the tokens that end a text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.data.tokenizers.as_json import json_files
from trainer.data.tokenizers.template_files import end_ids, find_template
from trainer.data.tokenizers.tokenizer import Tokenizer, open_tokenizer, tokenizer_file
from trainer.families.registry import ModelFolder
from trainer.hugging_face.folder import GENERATION_FILE

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_PROBE = "def f(x):\n\treturn x ** 2  # naïve — 日本語 🙂 don't 12345\r\n   \n"


@dataclass(frozen=True)
class TextFiles:
    """Files about text.

    Attributes:
        carried: The folder whose tokenizer and generation files are copied. None if there is none.
        files: Other files by name, texts or contents of JSON; they replace copied files.
        ids: Entries of config.json.
    """

    carried: Path | None
    files: dict[str, Any]
    ids: dict[str, Any]


def text_files(config: JobConfig, longest: int, source: ModelFolder | None) -> TextFiles:
    """Return the files about text of a run, with the tokenizer that it used.

    Args:
        config: The configuration.
        longest: Longest sequence of the model, in tokens.
        source: The folder from which the run started; it has these files, unless the run had another tokenizer.

    Raises:
        ConfigError: A file cannot be read, or is damaged.
    """
    model = config.model
    tokenizer = open_tokenizer(model.tokenizer_file)
    file = tokenizer_file(model.tokenizer_file)
    files = {}
    own = (
        source
        if source is not None
        and (source.path in file.parents or _is_tokenizer(source.path, tokenizer))
        else None
    )
    carried = own.path if own is not None and (own.path / "tokenizer.json").is_file() else None
    if carried is None and file.name.endswith(".json"):
        carried = file.parent
        own = ModelFolder(carried)
    if carried is None:
        files |= json_files(str(file), longest)
    template = find_template(model.tokenizer_file, model.chat_template, config.chat)
    if template is not None and (model.chat_template is not None or carried is None):
        files["chat_template.jinja"] = template.source
    before = {} if own is None else own.generation.content
    ends = sorted(end_ids(tokenizer, [own], template))
    eos = before.get("eos_token_id")
    if carried is None or set(ends) != set(eos if isinstance(eos, list) else [eos]):
        begin = {} if before else {"bos_token_id": tokenizer.bos_id}
        files[GENERATION_FILE] = {
            **before,
            **begin,
            "eos_token_id": ends if len(ends) > 1 else ends[0],
        }
    if own is None or own != source:
        ids = {
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "pad_token_id": None,
        }
        # without an entry some classes use an id of another vocabulary
        return TextFiles(carried, files, ids)
    there = source.entries.content
    return TextFiles(carried, files, {key: there[key] for key in _TOKENS if key in there})


def _is_tokenizer(folder: Path, tokenizer: Tokenizer) -> bool:
    """Return whether a folder has this tokenizer, perhaps in another format."""
    try:
        other = open_tokenizer(str(folder))
    except ConfigError:
        return False
    return other.vocab_size == tokenizer.vocab_size and other.encode(
        _PROBE
    ) == tokenizer.encode(_PROBE)
