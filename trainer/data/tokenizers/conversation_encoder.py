"""Conversations to token ids, and which tokens are learned. Torch-free."""

from collections.abc import Mapping

import numpy as np

from trainer.config.errors import ConfigError
from trainer.config.schema import Chat
from trainer.data.tokenizers.chat_messages import Conversation, Spans
from trainer.data.tokenizers.chat_notes import ANSWERS
from trainer.data.tokenizers.chat_template import ChatTemplate
from trainer.data.tokenizers.template_files import find_template
from trainer.data.tokenizers.tokenizer import Encoded, Tokenizer, open_tokenizer


class ConversationEncoder:
    """Renders and encodes conversations.

    Args:
        tokenizer: The tokenizer.
        template: The template; None for prompts and answers as plain text.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template

    @classmethod
    def of(
        cls, tokenizer_path: str, chat_template: str | None, chat: Chat
    ) -> "ConversationEncoder":
        """Return the encoder for a tokenizer and its template. Without a template, it encodes prompts and answers.

        Args:
            tokenizer_path: The file or folder of the tokenizer.
            chat_template: The value of model.chat_template.
            chat: The table [chat].

        Raises:
            ConfigError, MissingFile: As `open_tokenizer` and `find_template`.
        """
        tokenizer = open_tokenizer(tokenizer_path)
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        ends = {name: tokenizer.decode([i]) for name, i in ids.items() if i is not None}
        return cls(tokenizer, find_template(tokenizer_path, chat_template, chat, ends))

    @property
    def identity(self) -> str | None:
        """Everything except the conversations that decides the texts; None without a template."""
        return self._template and self._template.identity

    @property
    def files(self) -> str | None:
        """The template and the special tokens of its files; None without a template."""
        return self._template and self._template.files

    def encode(self, document: Conversation) -> Encoded:
        """Return the tokens of a conversation, the mask of tokens in an answer, and notes if there is a template.

        Args:
            document: The conversation.

        Raises:
            ConfigError: The template refuses it, or it has messages and there is no template.
        """
        if self._template is None:
            return self._plain(**plain_text(document))
        rendered, answers = self._template.render(document)
        encoded = _marked(*self._tokenizer.encode_with_places(rendered, special=True), answers)
        return encoded._replace(notes=self._template.notes(document, rendered, answers))

    def notes(self, document: Conversation) -> Mapping[str, int]:
        """Return the notes of `encode`, without tokens.

        Args:
            document: The conversation.

        Raises:
            ConfigError: As `encode`.
        """
        if self._template is None:
            return self.encode(document).notes
        return self._template.notes(document, *self._template.render(document))

    def _plain(self, prompt: str, answer: str) -> Encoded:
        ids, places = self._tokenizer.encode_with_places(prompt + answer, special=False)
        end = len(prompt) + len(answer)
        tokenizer = self._tokenizer
        if tokenizer.bos_id is not None:
            ids = np.append(tokenizer.bos_id, ids)
            places = np.concatenate([[[-1, 0]], places])
        if tokenizer.eos_id is not None:
            ids = np.append(ids, tokenizer.eos_id)
            places = np.concatenate([places, [[end, end + 1]]])
        notes = {ANSWERS: 1} | ({"end": 1} if tokenizer.eos_id is None else {})
        return _marked(ids, places, [(len(prompt), end + 1)])._replace(notes=notes)


def plain_text(conversation: Conversation) -> dict[str, str]:
    """Return prompt and answer of a conversation that needs no template, under the keys `prompt` and `answer`.

    Args:
        conversation: The conversation.

    Raises:
        ConfigError: It has messages.
    """
    if "messages" in conversation:
        raise ConfigError(
            f'{conversation["where"]()} has "messages", which need a chat template, and the tokenizer has none; name '
            "its Jinja file in model.chat_template, or the folder of an instruction-tuned model in model.tokenizer_path"
        )
    return {"prompt": conversation["prompt"], "answer": conversation["answer"]}


def _marked(ids: np.ndarray, places: np.ndarray, answers: Spans) -> Encoded:
    """Return tokens (n,) with their mask (n,) bool. A token is learned if all of its characters are in one answer.

    places (n, 2): the characters [start, stop) of each token.
    """
    starts, stops = places.T
    learned = np.zeros(len(ids), dtype=bool)
    for start, stop in answers:
        learned |= (start <= starts) & (starts < stop) & (stops <= stop)
    return Encoded(ids, learned)
