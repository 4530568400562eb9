"""How commands talk to a model: by its chat template, its tools, and the tokens that end texts and answers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trainer.commands.options import Parser
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.data.tokenizers.chat_messages import read_messages, read_template_arguments
from trainer.data.tokenizers.chat_template import ChatTemplate
from trainer.data.tokenizers.template_files import end_ids, find_template
from trainer.families.registry import start_folder
from trainer.hugging_face.folder import HFFolder

if TYPE_CHECKING:
    from trainer.data.tokenizers.tokenizer import Tokenizer

_OPENED = "<think>"
_BEFORE = 8  # tokens
PATIENCE_SECONDS = 7 * 24 * 3600
"""How long ranks wait for a user."""
Message = Mapping[str, Any]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def ends_of(
    config: JobConfig, tokenizer: "Tokenizer", template: ChatTemplate | None = None
) -> set[int]:
    """Return the tokens that end a text; with a template, also the tokens that end an answer.

    Args:
        config: The configuration of the run.
        tokenizer: The tokenizer.
        template: The chat template, None without one.
    """
    file = Path(config.model.tokenizer_file)
    folders = (HFFolder(file), HFFolder(file.parent), start_folder(config))
    return end_ids(tokenizer, folders, template)


def text_tokens(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Return the tokens of a text to be continued, after the token that begins texts, if there is one.

    Args:
        tokenizer: The tokenizer.
        text: The text.
    """
    return ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(text)


def check_length(prompt: Sequence[int], longest: int) -> None:
    """Check that the model takes a prompt and one more token.

    Args:
        prompt: The tokens of the prompt.
        longest: Most tokens of the model.

    Raises:
        ConfigError: It does not.
    """
    if not 0 < len(prompt) < longest:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens, and the model takes 1 to {longest - 1}"
        )


def talk_options(described: Parser, when: str = "", *, tools: bool = True) -> None:
    """Add the options of commands that talk to a model.

    Args:
        described: The parser of the command.
        when: When the options have an effect, for the help.
        tools: Whether the command has an option for tools; otherwise each request names them.
    """
    if tools:
        described.add_argument(
            "--tools",
            type=Path,
            metavar="FILE",
            help=f"{when}tools of the model, a list in JSON",
        )
    text = f"{when}argument of the chat template, as enable_thinking=false; may be given again"
    described.add_argument(
        "--argument", action="append", default=[], metavar="NAME=VALUE", help=text
    )


@dataclass(frozen=True)
class Talk:
    """How a model is talked to. tools: objects as the template takes them; ends: tokens that end an answer."""

    tokenizer: "Tokenizer"
    template: ChatTemplate
    tools: Sequence[Mapping[str, Any]]
    ends: frozenset[int]

    @classmethod
    def of(cls, config: JobConfig, tools: Path | None = None) -> "Talk":
        """Return the talk for the tokenizer and template of a model.

        Args:
            config: The configuration of the run.
            tools: A file of JSON with tools, None without one.

        Raises:
            ConfigError: A file or the template is missing.
        """
        from trainer.data.tokenizers.tokenizer import open_tokenizer

        template = find_template(
            config.model.tokenizer_file, config.model.chat_template, config.chat
        )
        if template is None:
            raise ConfigError(
                "this model has no chat template, so that it cannot be talked to; use lct generate without --chat, or "
                "name a Jinja file in model.chat_template before training, or put the chat_template.jinja of an "
                "instruction-tuned model into the model's folder"
            )
        tokenizer = open_tokenizer(config.model.tokenizer_file)
        given = []
        if tools is not None:
            try:
                given = json.loads(tools.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{tools} cannot be read as JSON ({error})") from None
        if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
            raise ConfigError(
                f"--tools {tools} must be a list of objects; write what the template's model expects"
            )
        ends = frozenset(ends_of(config, tokenizer, template))
        return cls(tokenizer, template, given, ends)

    def prompt(self, messages: object, more: Mapping[str, Any] = _NOTHING) -> list[int]:
        """Return the tokens that ask for the next answer.

        Args:
            messages: The messages, as in data.
            more: Fields of a request: tools, tool_choice, chat_template_kwargs with arguments of the template, and
                add_generation_prompt.

        Raises:
            ConfigError: The template refuses the messages.
        """
        values = read_template_arguments(more.get("chat_template_kwargs"))
        tools = (
            None
            if more.get("tool_choice") == "none"
            else more.get("tools") or self.tools or None
        )
        brought = {
            "tools": tools,
            "values": values,
            "asks": more.get("add_generation_prompt") is not False,
        }
        text = self.template.prompt({"messages": read_messages(messages), **brought})
        return self.tokenizer.encode_with_places(text, special=True)[0].tolist()

    def fitting(
        self, messages: Sequence[Message], longest: int, room: int
    ) -> tuple[list[Message], list[int], int]:
        """Drop the earliest whole turns until the prompt fits; return the remaining messages.

        A turn begins with a message of the user. System messages before the first turn, and the last turn, stay.

        Args:
            messages: The conversation, which asks for an answer.
            longest: Most tokens of prompt and answer of the model.
            room: Tokens to keep for the answer, if leaving out turns can do that.

        Returns:
            The remaining messages, their prompt, and the number of dropped turns.

        Raises:
            ConfigError: The template refuses the messages, or the last turn alone is too long.
        """
        starts = [i for i, message in enumerate(messages) if message["role"] == "user"] or [0]
        before = list(messages[: starts[0]])
        left_out = 0
        while True:
            kept = before + list(messages[starts[left_out] :])
            prompt = self.prompt(kept)
            fits = len(prompt) + room <= longest
            if fits or left_out + 1 == len(starts):
                break
            left_out += 1
        check_length(prompt, longest)
        return kept, prompt, left_out

    def answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> dict[str, str]:
        """Return the text of the model as a message. Reasoning that the prompt has begun is part of it.

        Args:
            prompt: The tokens of the prompt.
            tokens: The tokens of the answer.
        """
        return {
            "role": "assistant",
            "content": self.opening(prompt) + self.tokenizer.decode(tokens),
        }

    def opening(self, prompt: Sequence[int]) -> str:
        """Return the beginning of the answer with which the prompt ends.

        Args:
            prompt: The tokens of the prompt.
        """
        return (
            f"{_OPENED}\n"
            if self.tokenizer.decode(prompt[-8:]).rstrip().endswith(_OPENED)
            else ""
        )


class Pieces:
    """Text of tokens, as soon as they are whole characters, up to the first text that ends it.

    Some earlier tokens decide how a new token is written.

    Args:
        decode: Returns the text of tokens.
        stops: Texts that end it.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()
    ) -> None:
        self._decode = decode
        self._tokens = []
        self._given = 0
        self._stops, self._held, self.stopped = stops, "", False

    def put(self, token: int) -> str:
        """Return the text that is certain with this token. The possible beginning of a stop waits.

        Args:
            token: The token.
        """
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith("\ufffd"):  # the rest of a character is to come
            return ""
        piece = text[self._given :]
        self._tokens = self._tokens[-_BEFORE:]
        self._given = len(self._decode(self._tokens))
        return self._certain(piece, max(map(len, self._stops), default=1) - 1)

    def finish(self) -> str:
        """Return the remaining text."""
        return (
            "" if self.stopped else self._certain(self._decode(self._tokens)[self._given :], 0)
        )

    def _certain(self, more: str, waits: int) -> str:
        text = self._held + more
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.stopped = bool(places)
        end = min(places) if places else max(len(text) - waits, 0)
        self._held = "" if places else text[end:]
        return text[:end]
