"""Documents to token ids: texts, and conversations with the tokens of their answers. Torch-free.

rendered   <|user|>\n2 + 2?<|end|>\n<|assistant|>\n4<|end|>\n     the template writes all but the contents
answers                                           ------          with the token that ends them
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer.config.errors import ConfigError
from trainer.config.schema import Chat
from trainer.data.tokenizers.chat_template import ChatTemplate, find_template
from trainer.data.tokenizers.tokenizer import Tokenizer, open_tokenizer


class Encoded(NamedTuple):
    """A document. ids: (n,) integers; answers: (n,) bool, whether a token is learned; None: all are.

    lengths: of its parts, which do not see each other but are packed together; empty: it is one part.
    """

    ids: np.ndarray
    answers: np.ndarray | None = None
    lengths: tuple[int, ...] = ()


NOTHING = Encoded(np.empty(0, dtype=np.int64))
"""A document without text."""


class ConversationEncoder:
    """Renders conversations. template: None for prompts and answers that are plain text."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template

    @classmethod
    def of(cls, tokenizer_path: str, chat_template: str | None, chat: Chat) -> "ConversationEncoder":
        """Return the encoder for a tokenizer and a template; it raises as `open_tokenizer` and `find_template`."""
        tokenizer = open_tokenizer(tokenizer_path)
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        ends = {name: tokenizer.decode([i]) for name, i in ids.items() if i is not None}
        return cls(tokenizer, find_template(tokenizer_path, chat_template, chat, ends))

    @property
    def identity(self) -> str | None:
        """What the texts depend on, beside the conversations."""
        return self._template and self._template.identity

    def encode(self, document: Mapping[str, Any]) -> Encoded:
        """Return the tokens of a conversation, and which lie in an answer; ConfigError if the template refuses it."""
        if self._template is None:
            return self._plain(**plain_text(document))
        rendered, answers = self._template.render(document)
        return _marked(*self._tokenizer.encode_with_places(rendered, special=True), answers)

    def _plain(self, prompt: str, answer: str) -> Encoded:
        ids, places = self._tokenizer.encode_with_places(prompt + answer, special=False)
        end = len(prompt) + len(answer)
        tokenizer = self._tokenizer
        if tokenizer.bos_id is not None:
            ids, places = np.append(tokenizer.bos_id, ids), np.concatenate([[[-1, 0]], places])
        if tokenizer.eos_id is not None:
            ids, places = np.append(ids, tokenizer.eos_id), np.concatenate([places, [[end, end + 1]]])
        return _marked(ids, places, [(len(prompt), end + 1)])


def plain_text(found: Mapping[str, Any]) -> dict[str, str]:
    """Return prompt and answer of a conversation that needs no template; ConfigError if it has messages."""
    if "messages" in found:
        raise ConfigError(
            f'{found["where"]()} has "messages", which need a chat template, and the tokenizer has none; name its '
            "Jinja file in model.chat_template, or the folder of an instruction-tuned model in model.tokenizer_path"
        )
    return {"prompt": found["prompt"], "answer": found["answer"]}


def _marked(ids: np.ndarray, places: np.ndarray, answers: Sequence[tuple[int, int]]) -> Encoded:
    """Return tokens, and which lie in an answer. A token with a character outside of it does not.

    ids: (n,); places: (n, 2), the characters [start, stop) of each token.
    """
    starts, stops = places.T
    learned = np.zeros(len(ids), dtype=bool)
    for start, stop in answers:
        learned |= (start <= starts) & (starts < stop) & (stops <= stop)
    return Encoded(ids, learned)
