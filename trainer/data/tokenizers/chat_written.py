"""Check that a chat template has written every answer, tool call and tool message: many leave out what they lack."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

CHECKED = ("user", "assistant", "tool")  # a system message may be written inside another one


def function_of(call: object) -> tuple[str, object] | None:
    """Return the name and the arguments of a tool call, or None if it is none."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        return None
    return function["name"], function.get("arguments", {})


def left_out(messages: Sequence[Mapping[str, Any]], text: str) -> str:
    """Return what of the messages is not in the rendered text, in words, or '' if all is there.

    The contents must stand in the order of the messages, so that a short one is not found in another's place.
    """
    place = 0
    for number, message in enumerate(messages, 1):
        if message["role"] not in CHECKED:
            continue
        start, content = place, _without_reasoning(message["content"])
        if content and (place := _end_of(content, text, start)) < 0:
            what = "answer" if message["role"] == "assistant" else "content"
            return f"the {what} of message {number} ({message['role']})"
        for call in message.get("tool_calls") or ():
            function, arguments = function_of(call)
            end = _end_of(function, text, start)
            twice = isinstance(arguments, str) and arguments.strip() not in text and _quoted(arguments) in text
            if twice or end < 0 or any(_end_of(value, text, start) < 0 for value in _values(arguments)):
                return f"the call of {function!r} in message {number}"
            start, place = end, max(place, end)
    return ""


def other_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the messages with arguments of calls as objects in the place of strings of JSON, and the other way round.

    None if no message calls a tool.
    """
    changed = json.loads(json.dumps(messages))
    for message in changed:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            arguments = function.get("arguments", {})
            if not isinstance(arguments, str):
                function["arguments"] = json.dumps(arguments, ensure_ascii=False)
            else:
                with suppress(ValueError):
                    function["arguments"] = json.loads(arguments)
    return None if changed == list(messages) else changed


def is_in(content: str, text: str) -> bool:
    """Return whether a text has a content as it is, or as a string of JSON."""
    return _end_of(_without_reasoning(content), text, 0) >= 0


def _without_reasoning(content: str) -> str:
    """Return a content without the reasoning before it, which many templates take out of earlier answers."""
    return content.rpartition("</think>")[2].strip()


def _end_of(content: str, text: str, start: int) -> int:
    """Return where a content ends that is written as it is, or as a string of JSON; -1 if it is not there."""
    for form in (content, _quoted(content), json.dumps(content)[1:-1]):
        if (found := text.find(form, start)) >= 0:
            return found + len(form)
    return -1


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _values(arguments: object) -> Iterator[str]:
    """Yield the texts and numbers in the arguments of a call."""
    if isinstance(arguments, str):
        try:
            yield from _values(json.loads(arguments))
        except ValueError:
            yield arguments.strip()
    elif isinstance(arguments, Mapping | list):
        inside = arguments.values() if isinstance(arguments, Mapping) else arguments
        for value in inside:
            if isinstance(value, str):
                yield value.strip()
            else:
                yield from _values(value)
    elif arguments is not None and not isinstance(arguments, bool):
        yield json.dumps(arguments)
