"""Conversations and pairs of answers, each a line of JSON. Torch-free.

A conversation has `messages` (objects with `role` and `content`), or a `prompt` and an `answer`. Two other formats are
read: ShareGPT's `conversations` of `from` and `value`; and TRL's messages as `prompt` and `completion`, where only the
completion is learned.

A pair has `chosen` and `rejected`, and may have a `prompt`:

    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}     messages as in conversations
    {"chosen": [messages], "rejected": [messages]}                           the prompt is their common beginning,
                                                                             also if both repeat a `prompt`
    {"prompt": "...", "chosen": "...", "rejected": "..."}

A pair becomes two successive documents of token files, first the chosen side, then the rejected side, which are packed
together (`Pairs`). Answers in the prompt are not learned.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import takewhile
from typing import Any

from trainer.config.errors import ConfigError
from trainer.data.sources.records import BadRecord, Where
from trainer.data.tokenizers.chat_messages import (
    EXAMPLE,
    Conversation,
    Messages,
    are_objects,
    read_messages,
    read_template_arguments,
)
from trainer.data.tokenizers.tokenizer import replace_surrogates

ANSWER_KEYS = ("answer", "completion", "response")
COLUMNS = ("messages", "conversations", "system", "prompt", *ANSWER_KEYS)
COLUMNS += ("chosen", "rejected", "tools", "chat_template_kwargs")
"""Keys of a line, or columns of a table, that are read."""
_SHARE_GPT = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_EXAMPLE = f'{{"prompt": "...", "answer": "..."}} or {EXAMPLE}'
_PAIR = '{"chosen": [{"role": "user", "content": "..."}, ...], "rejected": [...]}'


def conversation(content: bytes, where: Where) -> Conversation | BadRecord:
    """Return the conversation of a line.

    Args:
        content: The line.
        where: Returns the place of the line, for messages.

    Returns:
        A dict with `messages`, or `prompt` and `answer`; and the function `where`. With messages, also `tools` and
        `values`, if the line has them; `values` are arguments of the template (`chat_template_kwargs`). A message of
        weight 0 is not learned. A `BadRecord` if the line is no conversation, or has no answer to learn.
    """
    try:
        return _checked(content) | {"where": where}
    except ConfigError as error:
        return BadRecord(f"{where()}: {error}")


def _checked(content: bytes) -> Conversation:
    try:
        line = json.loads(content)
        # an escaped lone surrogate is legal JSON, but not legal Unicode
        if b"\\ud" in content.lower():
            line = json.loads(replace_surrogates(json.dumps(line, ensure_ascii=False)))
    except (ValueError, RecursionError):
        line = None
    if not isinstance(line, dict):
        raise ConfigError(f"it must be a JSON object in UTF-8, such as {_EXAMPLE}")
    if (raw := _raw_messages(line)) is not None:
        values = read_template_arguments(line.get("chat_template_kwargs"))
        others = {"tools": _tools(line.get("tools")), "values": values}
        return {"messages": _messages(raw)} | {
            name: value for name, value in others.items() if value
        }
    answer = next((key for key in ANSWER_KEYS if key in line), None)
    if "prompt" not in line or answer is None:
        raise ConfigError(
            f'it has neither "messages" nor "prompt" and "answer"; write {_EXAMPLE}'
        )
    for key in ("prompt", answer):
        if not isinstance(line[key], str):
            raise ConfigError(f'"{key}" must be a string; write {_EXAMPLE}')
    if not line[answer].strip():
        raise ConfigError(
            f'"{answer}" is empty, so that there is nothing to learn; leave the line out'
        )
    return {"prompt": line["prompt"], "answer": line[answer]}


def _raw_messages(line: Mapping[str, Any]) -> object:
    """Return the messages of a line in any of the formats, unchecked; None if the line is in none of these formats."""
    if "messages" in line:
        return line["messages"]
    if are_objects(turns := line.get("conversations")):
        system = [{"role": "system", "content": line["system"]}] if line.get("system") else []
        return system + [
            {
                "role": _SHARE_GPT.get(turn.get("from"), turn.get("from")),
                "content": turn.get("value"),
            }
            if "from" in turn
            else turn
            for turn in turns
        ]
    prompt = line.get("prompt")
    completion = line.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return [
            message | {"weight": 0} if isinstance(message, dict) else message
            for message in prompt
        ] + completion
    return None


def _messages(raw: object) -> Messages:
    messages = read_messages(raw)
    for number, message in enumerate(messages, 1):
        if message.get("weight", 1) not in (0, 1):
            raise ConfigError(
                f'message {number}: "weight" = {message["weight"]!r} must be 0 (not learned) or 1'
            )
        is_answer = message["role"] == "assistant"
        if is_answer and not message["content"].strip() and not message.get("tool_calls"):
            raise ConfigError(
                f"message {number}: the answer is empty; leave the message or the line out"
            )
    if not any(
        message["role"] == "assistant" and message.get("weight", 1) for message in messages
    ):
        raise ConfigError(
            "no message is of the role 'assistant' with a weight above 0, so that there is no answer; leave the line "
            "out"
        )
    return messages


def _tools(raw: object) -> list[dict[str, Any]]:
    """Return the tools of a line, which may be a string of JSON; [] for none. Other values raise a ConfigError."""
    tools = raw or []
    with suppress(ValueError, RecursionError):
        tools = json.loads(tools) if isinstance(tools, str) else tools
    if not are_objects(tools):
        raise ConfigError('"tools" must be a list of objects, or a string of JSON that is one')
    return tools


def preference(content: bytes, where: Where) -> Iterator[Conversation | BadRecord | str]:
    """Yield both sides of a line as conversations, first the chosen one. Messages of the prompt have the weight 0.

    Args:
        content: The line.
        where: Returns the place of the line, for messages.

    Yields:
        Two conversations, as `conversation` returns them. If the line is no pair: a `BadRecord` that says why, then "".
    """
    try:
        line = json.loads(content)
        sides = list(_sides(line))
        if line["chosen"] == line["rejected"]:
            raise ConfigError("chosen and rejected are the same; leave the line out")
        documents = [_checked(json.dumps(side).encode()) | {"where": where} for side in sides]
    except ConfigError as error:
        documents = [BadRecord(f"{where()}: {error}"), ""]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        documents = [
            BadRecord(
                f'{where()}: it has no "chosen" and "rejected" of one kind; write {_PAIR}'
            ),
            "",
        ]
    yield from documents


def _sides(line: Mapping[str, Any]) -> Iterator[Conversation]:
    prompt = line.get("prompt")
    answers = (line["chosen"], line["rejected"])
    if all(isinstance(answer, str) for answer in answers):
        yield from ({"prompt": prompt, "answer": answer} for answer in answers)
        return
    if not all(isinstance(answer, list) for answer in answers):
        raise TypeError("sides of two kinds")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    is_repeated = prompt and all(answer[: len(prompt)] == prompt for answer in answers)
    if prompt is None or is_repeated:
        prompt = [
            a
            for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False))
        ]
        answers = tuple(answer[len(prompt) :] for answer in answers)
    if not all(answers):
        raise ConfigError("the prompt alone is a side of the pair; leave the line out")
    prompt = [message | {"weight": 0} for message in prompt]
    for answer in answers:
        yield {"messages": [*prompt, *answer], "tools": line.get("tools")}
