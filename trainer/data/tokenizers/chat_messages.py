"""Read messages, of data or of a client of OpenAI's API, into the form that chat templates take. Torch-free.

    {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}     {"role": "user", "content": "2 + 2?"}
    {"role": "assistant", "content": null, "tool_calls": [...]}           {"role": "assistant", "content": "", ...}
    {"role": "assistant", "content": "4", "refusal": null}                {"role": "assistant", "content": "4"}

Training and every command that writes an answer read messages here, so that the same messages become the same text.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from trainer.config.errors import ConfigError

Message = Mapping[str, Any]
"""An object with "role" and "content"."""
Messages = Sequence[Message]
Conversation = Mapping[str, Any]
"""An object with "messages", or with "prompt" and "answer"."""
Spans = Sequence[tuple[int, int]]
"""The characters [start, stop) of parts of a text."""

ROLES = ("system", "developer", "user", "assistant", "tool")
EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, ...]}'


def read_messages(raw: object) -> list[dict[str, Any]]:
    """Return messages as templates take them: contents are strings, and keys without a value are left out.

    Args:
        raw: The messages of JSON.

    Raises:
        ConfigError: There is no message, a message has another form, or a part is no text.
    """
    if not raw or not are_objects(raw):
        raise ConfigError(
            f'"messages" must be a list of objects with "role" and "content"; write {EXAMPLE}'
        )
    return [_message(message, number) for number, message in enumerate(raw, 1)]


def are_objects(raw: object) -> bool:
    """Return whether a value of JSON is a list of objects.

    Args:
        raw: The value.
    """
    return isinstance(raw, list) and all(isinstance(item, dict) for item in raw)


def read_template_arguments(raw: object) -> dict[str, Any]:
    """Return the arguments of the template; {} if there are none.

    Args:
        raw: The value of `chat_template_kwargs`, None for none.

    Raises:
        ConfigError: It is no object.
    """
    if raw is not None and not isinstance(raw, dict):
        raise ConfigError(
            '"chat_template_kwargs" must be an object, such as {"enable_thinking": false}'
        )
    return raw or {}


def function_of(call: object) -> tuple[str, object] | None:
    """Return the name and the arguments of a tool call; None if `call` is no tool call with a name.

    The arguments are as in the call: mostly an object or a string of JSON. Missing arguments are {}.

    Args:
        call: The call of JSON, or its "function" alone.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"]
    ):
        return None
    return function["name"], function.get("arguments", {})


def argument_forms(messages: Messages) -> Iterator[Messages]:
    """Yield the messages with arguments of calls as objects, then unchanged, then as strings of JSON.

    Clients send strings of JSON. Most templates only take objects, and some write a string differently than an object.
    A form that equals the form before is left out. Messages without calls are only yielded unchanged.

    Args:
        messages: The messages.
    """
    if not any(message.get("tool_calls") for message in messages):
        yield messages
        return
    objects = _with_arguments(messages, _as_object)
    strings = _with_arguments(messages, _as_string)
    yield objects
    if messages != objects:
        yield messages
    if strings != messages:
        yield strings


def _message(raw: Message, number: int) -> dict[str, Any]:
    role = raw.get("role")
    calls = raw.get("tool_calls")
    if role not in ROLES:
        raise ConfigError(
            f'message {number}: "role" = {role!r} must be one of {", ".join(map(repr, ROLES))}'
        )
    if calls is not None and not (isinstance(calls, list) and all(map(function_of, calls))):
        raise ConfigError(
            f'message {number}: "tool_calls" must be a list of {{"function": {{"name": ..., "arguments": '
            "{...}}}, with the arguments as an object or a string of JSON"
        )
    kept = {key: value for key, value in raw.items() if value is not None}
    if not calls:
        kept.pop("tool_calls", None)
    return kept | {"content": _content(raw.get("content"), number, may_be_missing=bool(calls))}


def _content(content: object, number: int, *, may_be_missing: bool) -> str:
    """Return the text of a content; its text parts are joined. Other contents raise a ConfigError.

    A missing content is "" if `may_be_missing`, as in a message with calls.

    number: of the message, from 1, for errors.
    """
    if content is None and may_be_missing:
        return ""
    parts = content if isinstance(content, list) else []
    if parts and all(_is_text(part) for part in parts):
        return "".join(part["text"] for part in parts)
    if isinstance(content, str):
        return content
    kinds = [part.get("type") for part in parts if isinstance(part, dict)]
    other = next((kind for kind in kinds if isinstance(kind, str) and kind != "text"), None)
    problem = f"has a part of type {other!r}" if other else "is neither"
    raise ConfigError(
        f'message {number}: "content" must be a string, or a list of {{"type": "text", "text": "..."}}, and it '
        f"{problem}; other parts, such as images, are not read"
    )


def _is_text(part: object) -> bool:
    return (
        isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )


def _with_arguments(messages: Messages, form: Callable[[Any], Any]) -> list[dict[str, Any]]:
    changed = json.loads(json.dumps(messages))
    for message in changed:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            function["arguments"] = form(function.get("arguments", {}))
    return changed


def _as_object(arguments: Any) -> Any:
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            if isinstance(content := json.loads(arguments), dict):
                return content
    return arguments


def _as_string(arguments: Any) -> Any:
    return (
        arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    )
