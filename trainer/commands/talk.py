"""How commands talk to a model: its chat template, its tools, and the tokens that end its texts and answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands.options import Parser
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.data.tokenizers.chat_template import ChatTemplate, find_template
from trainer.stores.initial import hf_folder

if TYPE_CHECKING:
    from trainer.data.tokenizers.tokenizer import Tokenizer

_OPENED = "<think>"


def ends_of(config: JobConfig, tokenizer: "Tokenizer", template: ChatTemplate | None = None) -> set[int]:
    """Return the tokens that end a text; with a template also the one that ends an answer."""
    from trainer.data.tokenizers.ends import end_ids

    file = Path(config.model.tokenizer_file)
    return end_ids(tokenizer, (file, file.parent, hf_folder(config)), template)


def talk_options(described: Parser, when: str = "") -> None:
    """Add the options of how a model is talked to."""
    add = described.add_argument
    add("--tools", type=Path, metavar="FILE", help=f"{when}tools of the model, a list in JSON")
    text = f"{when}argument of the chat template, as enable_thinking=false; may be given again"
    add("--argument", action="append", default=[], metavar="NAME=VALUE", help=text)


@dataclass(frozen=True)
class Talk:
    """How a model is talked to. tools: objects as the template takes them; ends: tokens that end an answer."""

    tokenizer: "Tokenizer"
    template: ChatTemplate
    tools: Sequence[Mapping[str, Any]]
    ends: frozenset[int]

    @classmethod
    def of(cls, config: JobConfig, tools: Path | None = None) -> "Talk":
        """Return it for the tokenizer and the template of a model. tools: a file of JSON.

        Raises:
            ConfigError: there is no template, or the file has no list of tools.
        """
        from trainer.data.tokenizers.tokenizer import open_tokenizer

        template = find_template(config.model.tokenizer_file, config.model.chat_template, config.chat)
        if template is None:
            raise ConfigError(
                f"{config.model.tokenizer_file} has no chat template, so that the model cannot be talked to; use lct "
                "generate without --chat, or put the chat_template.jinja of an instruction-tuned model beside it"
            )
        tokenizer, given = open_tokenizer(config.model.tokenizer_file), None if tools is None else _json(tools)
        if tools is not None and not (isinstance(given, list) and all(isinstance(tool, dict) for tool in given)):
            raise ConfigError(f"--tools {tools} must be a list of objects; write what the template's model expects")
        return cls(tokenizer, template, given or (), frozenset(ends_of(config, tokenizer, template)))

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens that ask for the next answer; ConfigError if the template refuses the messages."""
        text = self.template.prompt({"messages": messages, "tools": self.tools or None})
        return self.tokenizer.encode_with_places(text, special=True)[0].tolist()

    def answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> dict[str, str]:
        """Return what the model has written as a message. Reasoning that the prompt has begun is part of it."""
        opened = self.tokenizer.decode(prompt[-8:]).rstrip().endswith(_OPENED)
        text = self.tokenizer.decode(tokens)
        return {"role": "assistant", "content": f"{_OPENED}\n{text}" if opened else text}


def _json(file: Path) -> object:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error})") from None
