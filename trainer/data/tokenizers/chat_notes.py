"""Count parts of conversations that their text lacks, and answers that do not end. Torch-free.

A template leaves some fields out by design: most only write the reasoning of the last answer. So these parts are
reported, and not refused: see `sentences`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.data.tokenizers.chat_answers import end_of
from trainer.data.tokenizers.chat_messages import (
    Conversation,
    Message,
    Messages,
    Spans,
    function_of,
)

REASONING = ("reasoning_content", "reasoning", "thinking", "thought")
"""Keys of a message in which data sets have reasoning."""
ANSWERS = "answers"
_WORDS = {
    "end": (
        "answers end in no special token in their text, so that the model does not learn to stop; use the template of "
        "the model, or write the end into it"
    ),
    "reasoning": (
        "answers have reasoning in the data and none in their text, so that the model learns to answer without it; "
        'chat.answers = "last" learns the last answer alone, whose reasoning most templates write'
    ),
    "tools": "conversations have tools that their text does not name; use a template that writes tools",
    "system": "conversations have a system message that is not in their text; use a template that writes it",
}

Notes = Mapping[str, int]


def notes_of(
    conversation: Conversation, learned: Messages, text: str, ends: Sequence[bool]
) -> dict[str, int]:
    """Return how many learned answers a conversation has, and how many of its parts the text lacks, by kind.

    Kinds with the number 0 are left out. Tools and system messages count at most once a conversation.

    Args:
        conversation: The conversation.
        learned: Its learned messages.
        text: The rendered text.
        ends: Whether each learned part has an end.
    """
    messages = conversation.get("messages") or ()
    lacks = {
        "end": ends.count(False),
        "reasoning": sum(_loses_reasoning(message, text) for message in learned),
        "tools": int(not all(map(text.__contains__, _names(conversation.get("tools") or ())))),
        "system": int(
            not all(
                _has(m["content"], text)
                for m in messages
                if m["role"] in ("system", "developer")
            )
        ),
    }
    return {ANSWERS: len(learned)} | {kind: number for kind, number in lacks.items() if number}


def ends_of_spans(text: str, spans: Spans, special: tuple[str, ...]) -> list[bool]:
    """Return whether each learned part of a text ends in a special token, with or without white space after the token.

    Adjacent spans are one part, so that the list may be shorter than `spans`.

    Args:
        text: The text.
        spans: The characters [start, stop) of each learned part, in order.
        special: Texts of special tokens.
    """
    joined = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    return [text[start:stop].rstrip().endswith(special) for start, stop in joined]


def sum_of(notes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the sum of notes, by kind: "number" is the number, and "first" says where the first one is.

    Args:
        notes: Sums of several shards or sources.
    """
    total = {}
    for one in notes:
        for kind, entry in one.items():
            add(total, {kind: entry["number"]}, entry["first"])
    return total


def add(notes: dict[str, dict[str, Any]], new: Notes, where: str) -> None:
    """Add the notes of a conversation to a sum.

    Args:
        notes: The sum.
        new: The notes.
        where: File and line of the conversation.
    """
    for kind, number in new.items():
        notes.setdefault(kind, {"number": 0, "first": where})["number"] += number


def sentences(notes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each kind of missing part.

    Args:
        notes: The sum of notes.
    """
    answers = notes.get(ANSWERS, {"number": 0})["number"]
    return [
        f"{notes[kind]['number']:,}{f' of {answers:,}' if words.startswith('answers') else ''} {words} (first: "
        f"{notes[kind]['first']})"
        for kind, words in _WORDS.items()
        if kind in notes
    ]


def _loses_reasoning(message: Message, text: str) -> bool:
    written = message.get("content", "").rpartition("</think>")[0].replace("<think>", "")
    parts = [
        part
        for part in (written, *map(message.get, REASONING))
        if isinstance(part, str) and part.strip()
    ]
    return bool(parts) and not any(_has(part, text) for part in parts)


def _has(part: str, text: str) -> bool:
    return end_of(part.strip(), text, 0) >= 0


def _names(tools: Sequence[Any]) -> Iterator[str]:
    return (name for name, _ in filter(None, map(function_of, tools)))
