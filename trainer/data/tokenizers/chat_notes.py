"""Count what a conversation has and its text has not, and answers that do not end. Torch-free.

A template leaves some fields out by design: most write the reasoning of the last answer alone. So this is told, and not
refused: see `sentences`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.data.tokenizers.chat_answers import end_of
from trainer.data.tokenizers.chat_messages import function_of

REASONING = ("reasoning_content", "reasoning", "thinking", "thought")
"""Keys of a message that data sets keep reasoning in."""
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
    found: Mapping[str, Any],
    learned: Sequence[Mapping[str, Any]],
    text: str,
    ends: Sequence[bool],
) -> dict[str, int]:
    """Return how many learned answers a conversation has, and how many of them, or of it, lack something.

    found: the conversation; learned: its messages that are learned; ends: whether each part that is learned has an end.
    """
    messages = found.get("messages") or ()
    lacks = {
        "end": ends.count(False),
        "reasoning": sum(_loses_reasoning(message, text) for message in learned),
        "tools": int(not all(map(text.__contains__, _names(found.get("tools") or ())))),
        "system": int(
            not all(
                _has(m["content"], text)
                for m in messages
                if m["role"] in ("system", "developer")
            )
        ),
    }
    return {ANSWERS: len(learned)} | {kind: number for kind, number in lacks.items() if number}


def ends_of_spans(
    text: str, spans: Sequence[tuple[int, int]], special: Sequence[str]
) -> list[bool]:
    """Return whether each learned part of a text ends in a special token. Parts that touch are one part."""
    joined: list[list[int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    tokens = tuple(filter(None, special))
    return [text[start:stop].rstrip().endswith(tokens) for start, stop in joined]


def sum_of(notes: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return for each kind of the notes {"number", "first"}: the sum, and where the first one was."""
    found: dict[str, dict[str, Any]] = {}
    for one in notes:
        for kind, entry in one.items():
            add(found, {kind: entry["number"]}, entry["first"])
    return found


def add(notes: dict[str, dict[str, Any]], more: Notes, where: str) -> None:
    """Add the notes of a conversation to a sum. where: its file and line."""
    for kind, number in more.items():
        notes.setdefault(kind, {"number": 0, "first": where})["number"] += number


def sentences(notes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each kind of what is lacking; none if nothing is."""
    answers = notes.get(ANSWERS, {"number": 0})["number"]
    return [
        f"{notes[kind]['number']:,}{f' of {answers:,}' if words.startswith('answers') else ''} {words} (first: "
        f"{notes[kind]['first']})"
        for kind, words in _WORDS.items()
        if kind in notes
    ]


def _loses_reasoning(message: Mapping[str, Any], text: str) -> bool:
    written = message.get("content", "").rpartition("</think>")[0].replace("<think>", "")
    given = [
        part
        for part in (written, *(message.get(key) for key in REASONING))
        if isinstance(part, str)
    ]
    given = [part for part in given if part.strip()]
    return bool(given) and not any(_has(part, text) for part in given)


def _has(part: str, text: str) -> bool:
    return end_of(part.strip(), text, 0) >= 0


def _names(tools: Sequence[Any]) -> Iterator[str]:
    return (name for name, _ in filter(None, map(function_of, tools)))
