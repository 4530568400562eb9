"""Prompts and answers of a model: chat template, tools, and the tokens that end texts and answers."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trainer.commands.options import Parser
from trainer.config.errors import ConfigError
from trainer.config.schema import JobConfig
from trainer.data.tokenizers.chat_messages import (
    Message,
    Messages,
    are_objects,
    read_messages,
    read_template_arguments,
)
from trainer.data.tokenizers.chat_template import ChatTemplate
from trainer.data.tokenizers.template_files import end_ids, find_template
from trainer.families.registry import start_folder
from trainer.hugging_face.folder import HFFolder

if TYPE_CHECKING:
    from trainer.data.tokenizers.tokenizer import Tokenizer

_OPENED = "<think>"
_CONTEXT = 8  # earlier tokens that decide the text of a token
PATIENCE_SECONDS = 7 * 24 * 3600
"""How long other ranks wait while rank 0 waits for a user."""
_NOTHING = MappingProxyType({})


def ends_of(
    config: JobConfig, tokenizer: "Tokenizer", template: ChatTemplate | None = None
) -> set[int]:
    """Return the tokens that end a text. With a template, also return the tokens that end an answer.

    Args:
        config: The configuration of the run.
        tokenizer: The tokenizer.
        template: The chat template; None without one.
    """
    file = Path(config.model.tokenizer_file)
    folders = (HFFolder(file), HFFolder(file.parent), start_folder(config))
    return end_ids(tokenizer, folders, template)


def text_tokens(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Return the tokens of a text to continue. If the tokenizer has a token that begins texts, it comes first.

    Args:
        tokenizer: The tokenizer.
        text: The text.
    """
    return ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(text)


def check_length(prompt: Sequence[int], longest: int) -> None:
    """Check that a prompt is not empty, and that the model takes the prompt and one further token.

    Args:
        prompt: The tokens of the prompt.
        longest: Largest number of tokens that the model takes.

    Raises:
        ConfigError: The prompt is empty or too long.
    """
    if not 0 < len(prompt) < longest:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens, and the model takes 1 to {longest - 1}"
        )


def talk_options(described: Parser, when: str = "", *, tools: bool = True) -> None:
    """Add --tools and --argument, for commands that use a chat template.

    Args:
        described: The parser of the command.
        when: The condition under which the options have an effect, for the help.
        tools: Whether to add --tools. Without it, each request names its tools.
    """
    if tools:
        described.add_argument(
            "--tools",
            type=Path,
            metavar="FILE",
            help=f"{when}tools of the model, a list in JSON",
        )
    described.add_argument(
        "--argument",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"{when}argument of the chat template, such as enable_thinking=false; may be repeated",
    )


@dataclass(frozen=True)
class Talk:
    """The chat template of a model, with its tokenizer.

    Attributes:
        tokenizer: The tokenizer.
        template: The chat template.
        tools: Descriptions of tools, in the form that the template takes.
        ends: Tokens that end an answer.
    """

    tokenizer: "Tokenizer"
    template: ChatTemplate
    tools: Sequence[Mapping[str, Any]]
    ends: frozenset[int]

    @classmethod
    def of(cls, config: JobConfig, tools: Path | None = None) -> "Talk":
        """Load tokenizer and chat template of a model.

        Args:
            config: The configuration of the run.
            tools: A JSON file with a list of tools; None without tools.

        Returns:
            The record.

        Raises:
            ConfigError: The model has no chat template, or a file is missing or wrong.
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
        tool_list = []
        if tools is not None:
            try:
                tool_list = json.loads(tools.read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"{tools} cannot be read as JSON ({error})") from None
        if not are_objects(tool_list):
            raise ConfigError(
                f"--tools {tools} must be a list of objects; write what the template's model expects"
            )
        ends = frozenset(ends_of(config, tokenizer, template))
        return cls(tokenizer, template, tool_list, ends)

    def prompt(self, messages: object, fields: Mapping[str, Any] = _NOTHING) -> list[int]:
        """Return the tokens of the prompt for the next answer.

        Args:
            messages: The messages, in the format of training data.
            fields: Fields of a request: tools, tool_choice, chat_template_kwargs with arguments of the template, and
                add_generation_prompt.

        Raises:
            ConfigError: The template refuses the messages.
        """
        values = read_template_arguments(fields.get("chat_template_kwargs"))
        tools = (
            None
            if fields.get("tool_choice") == "none"
            else fields.get("tools") or self.tools or None
        )
        settings = {
            "tools": tools,
            "values": values,
            "asks": fields.get("add_generation_prompt") is not False,
        }
        text = self.template.prompt({"messages": read_messages(messages), **settings})
        return self.tokenizer.encode_with_places(text, special=True)[0].tolist()

    def fitting(
        self, messages: Messages, longest: int, room: int
    ) -> tuple[list[Message], list[int], int]:
        """Drop the earliest whole turns until the prompt fits; return the remaining messages.

        A turn begins with a message of the user. The messages before the first turn, and the last turn, always stay.

        Args:
            messages: The conversation, up to the message to answer.
            longest: Largest number of tokens of prompt and answer together.
            room: Tokens to keep for the answer. If only the last turn remains, the answer may have less room.

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
        """Return the answer of the model as a message, with the keys `role` and `content`.

        If the prompt ends with a mark of reasoning, the content begins with this mark.

        Args:
            prompt: The tokens of the prompt.
            tokens: The tokens of the answer.
        """
        return {
            "role": "assistant",
            "content": self.opening(prompt) + self.tokenizer.decode(tokens),
        }

    def opening(self, prompt: Sequence[int]) -> str:
        """Return the beginning of the answer that stands at the end of the prompt, or an empty text.

        Args:
            prompt: The tokens of the prompt.
        """
        end = self.tokenizer.decode(prompt[-8:]).rstrip()
        return f"{_OPENED}\n" * end.endswith(_OPENED)


class Pieces:
    """Decodes tokens one after the other, into whole characters, up to the first stop.

    The text of a token depends on a few tokens before it.

    Args:
        decode: Returns the text of tokens.
        stops: Texts that end the decoded text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()
    ) -> None:
        self._decode = decode
        self._tokens = []
        self._returned = 0
        self._stops = stops
        self._held = ""
        self.stopped = False

    def put(self, token: int) -> str:
        """Add a token. The possible beginning of a stop is held back. Do not call it after a stop.

        Args:
            token: The token.

        Returns:
            The text that is certain with this token.
        """
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith("\ufffd"):  # the character is not complete
            return ""
        piece = text[self._returned :]
        self._tokens = self._tokens[-_CONTEXT:]
        self._returned = len(self._decode(self._tokens))
        return self._certain(piece, max(map(len, self._stops), default=1) - 1)

    def finish(self) -> str:
        """Return the text that was held back; an empty text after a stop."""
        return (
            ""
            if self.stopped
            else self._certain(self._decode(self._tokens)[self._returned :], 0)
        )

    def _certain(self, piece: str, waits: int) -> str:
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        self.stopped = bool(places)
        end = min(places) if places else max(len(text) - waits, 0)
        self._held = "" if places else text[end:]
        return text[:end]
