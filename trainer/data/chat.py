"""Conversations: lines of JSON to tokens, with labels on the answers alone. Torch-free.

A line has `messages` (objects with `role` and `content`), or a `prompt` and an `answer`.

rendered   <|user|>\n2 + 2?<|end|>\n<|assistant|>\n4<|end|>\n     the template writes all but the contents
answers                                           ------          with the token that ends them
labels     of the tokens that lie in an answer; all others are IGNORE_INDEX
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data.chat_written import function_of
from trainer.data.packing import IGNORE_INDEX, Sample
from trainer.data.tokenizer import Tokenizer, replace_surrogates

if TYPE_CHECKING:
    from trainer.data.chat_template import ChatTemplate

logger = logging.getLogger("trainer")

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWER_KEYS = ("answer", "completion", "response")
_EXAMPLE = '{"prompt": "...", "answer": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}'


def conversation(content: bytes, where: str) -> dict[str, Any]:
    """Return the conversation of a line: `messages` and perhaps `tools`, or `prompt` and `answer`; and `where`.

    where: file and line, for messages.

    Raises:
        ConfigError: it is no conversation, or has no answer to learn from.
    """
    try:
        line = json.loads(content)
    except (ValueError, RecursionError):
        line = None
    if not isinstance(line, dict):
        raise ConfigError(f"{where}, must be a JSON object in UTF-8, such as {_EXAMPLE}")
    if "messages" in line:
        known = {"messages": _messages(line["messages"], where)}
        return known | ({"tools": tools} if (tools := _tools(line.get("tools"), where)) else {}) | {"where": where}
    answer = next((key for key in ANSWER_KEYS if key in line), None)
    if "prompt" not in line or answer is None:
        raise ConfigError(f'{where}, has neither "messages" nor "prompt" and "answer"; write {_EXAMPLE}')
    texts = {"prompt": line["prompt"], "answer": line[answer]}
    for key, text in zip(("prompt", answer), texts.values(), strict=True):
        if not isinstance(text, str):
            raise ConfigError(f'{where}: "{key}" must be a string; write {_EXAMPLE}')
    if not texts["answer"].strip():
        raise ConfigError(f'{where}: "{answer}" is empty, so that there is nothing to learn; leave the line out')
    return texts | {"where": where}


def as_text(found: Mapping[str, Any]) -> str:
    """Return a conversation as a JSON string in legal Unicode."""
    text = json.dumps(found, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # an escaped lone surrogate is legal JSON
        text = replace_surrogates(text)
    return text


def _messages(given: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given or not all(isinstance(message, dict) for message in given):
        raise ConfigError(f'{where}: "messages" must be a list of objects with "role" and "content"; write {_EXAMPLE}')
    messages = [_message(message, number, where) for number, message in enumerate(given, 1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(f"{where}: no message is of the role 'assistant', so that there is no answer; leave it out")
    return messages


def _tools(given: object, where: str) -> list[dict[str, Any]]:
    """Return the tools of a line, which many data sets store as a string of JSON."""
    tools = given or []
    with suppress(ValueError, RecursionError):
        tools = json.loads(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f'{where}: "tools" must be a list of objects, or a string of JSON that is one')
    return tools


def _message(given: Mapping[str, Any], number: int, where: str) -> dict[str, Any]:
    """Return a message with its content as one string, without entries that are null."""
    role, content = given.get("role"), given.get("content")
    if role not in ROLES:
        raise ConfigError(f'{where}, message {number}: "role" = {role!r} must be one of {", ".join(map(repr, ROLES))}')
    if content is None and given.get("tool_calls"):
        content = ""  # so the call is all that there is
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ConfigError(
            f'{where}, message {number}: "content" must be a string, or a list of {{"type": "text", "text": "..."}}; '
            "other parts, such as images, cannot be trained on"
        )
    if role == "assistant" and not content.strip() and not given.get("tool_calls"):
        raise ConfigError(f"{where}, message {number}: the answer is empty; leave the message or the line out")
    if not all(function_of(call) for call in given.get("tool_calls") or ()):
        raise ConfigError(
            f'{where}, message {number}: "tool_calls" must be a list of {{"function": {{"name": ..., "arguments": '
            "{...}}}, with the arguments as an object or a string of JSON"
        )
    return {key: value for key, value in given.items() if value is not None} | {"content": content}


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


class ConversationEncoder:
    """Makes samples of conversations: a label is the next token, if that is part of an answer.

    template: None for prompts and answers that are plain text.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._too_long = 0

    def pieces(self, document: str, seq_len: int) -> list[Sample]:
        """Return `sample_within`, unless it has no label."""
        sample = self.sample_within(seq_len, document)
        return [] if (sample.labels == IGNORE_INDEX).all() else [sample]

    def nothing(self, documents: int, stream: int, seq_len: int) -> str:
        """Return the message for a data stream whose conversations have no label."""
        return (
            f"the {documents} conversations of data stream {stream} have no answer within {seq_len} tokens; raise the "
            "sequence length or give more data"
        )

    def sample_within(self, seq_len: int, text: str) -> Sample:
        """Return `sample(text)` without what is behind `seq_len` tokens; the log tells how often that happened."""
        sample = self.sample(text)
        if (length := len(sample.tokens)) <= seq_len:
            return sample
        self._too_long += 1
        number = self._too_long
        if number == 10 ** (len(str(number)) - 1):  # the 1st, 10th, 100th ...
            logger.warning(
                f"{number:,} conversation{'s were' if number > 1 else ' was'} longer than {seq_len:,} tokens so far "
                f"(this one has {length:,}): the end is left out; a larger sequence length keeps it"
            )
        return Sample(sample.tokens[:seq_len], sample.labels[:seq_len])

    def sample(self, text: str) -> Sample:
        """Return the sample of a conversation, given as `as_text` writes it.

        Raises:
            ConfigError: the template cannot render it, or the tokenizer cannot tell special tokens from text.
        """
        found = json.loads(text)
        if self._template is None:
            return self._plain(**plain_text(found))
        rendered, answers = self._template.render(found)
        return _labelled(*self._tokenizer.encode_with_places(rendered, special=True), answers)

    def _plain(self, prompt: str, answer: str) -> Sample:
        ids, places = self._tokenizer.encode_with_places(prompt + answer, special=False)
        end = len(prompt) + len(answer)
        tokenizer = self._tokenizer
        if tokenizer.bos_id is not None:
            ids, places = np.append(tokenizer.bos_id, ids), np.concatenate([[[-1, 0]], places])
        if tokenizer.eos_id is not None:
            ids, places = np.append(ids, tokenizer.eos_id), np.concatenate([places, [[end, end + 1]]])
        return _labelled(ids, places, [(len(prompt), end + 1)])


def plain_text(found: Mapping[str, Any]) -> dict[str, str]:
    """Return prompt and answer of a conversation that needs no template.

    Raises:
        ConfigError: it has messages.
    """
    if "messages" in found:
        raise ConfigError(
            f'{found["where"]} has "messages", which need a chat template, and the tokenizer has none; name its Jinja '
            "file in model.chat_template, or the folder of an instruction-tuned model in model.tokenizer_path"
        )
    return {"prompt": found["prompt"], "answer": found["answer"]}


def _labelled(ids: np.ndarray, places: np.ndarray, answers: Sequence[tuple[int, int]]) -> Sample:
    """Return tokens and labels. A token with a character outside of an answer is no part of it.

    ids: (n,); places: (n, 2), the characters [start, stop) of each token.
    """
    starts, stops = places.T
    learnt = np.zeros(len(ids), dtype=bool)
    for start, stop in answers:
        learnt |= (start <= starts) & (starts < stop) & (stops <= stop)
    labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
    labels[:-1] = np.where(learnt[1:], ids[1:], IGNORE_INDEX)
    return Sample(ids.astype(np.int32), labels)
