"""Conversations: lines of JSON with `messages` (objects with `role` and `content`), or a `prompt` and an `answer`.

Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trainer.config.errors import ConfigError
from trainer.data.tokenizers.chat_written import function_of
from trainer.data.tokenizers.tokenizer import replace_surrogates

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
        if b"\\ud" in content.lower():  # an escaped lone surrogate is legal JSON, and no legal Unicode
            line = json.loads(replace_surrogates(json.dumps(line, ensure_ascii=False)))
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
