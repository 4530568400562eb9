"""The tokens that end a text of a model. Torch-free."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.data.tokenizers.chat_template import ChatTemplate
from trainer.data.tokenizers.tokenizer import Tokenizer
from trainer.data.tokenizers.tokenizer_json import read_settings

GENERATION_FILE = "generation_config.json"


def end_ids(tokenizer: Tokenizer, folders: Iterable[Path | None], template: ChatTemplate | None = None) -> set[int]:
    """Return the tokenizer's end, all that a `generation_config.json` names, and that of an answer of the template."""
    ends: set[Any] = {tokenizer.eos_id}
    for folder in set(folders) - {None}:
        named = read_settings(folder / GENERATION_FILE).get("eos_token_id")
        ends |= set(named) if isinstance(named, list) else {named}
    if template is not None:
        ends |= set(tokenizer.encode_with_places(template.end_of_answer(), special=True)[0].tolist())
    return {end for end in ends if type(end) is int and 0 <= end < tokenizer.vocab_size}
