"""Pairs of answers: lines of JSON with `chosen` and `rejected`, and perhaps a `prompt`. Torch-free.

    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}     messages as of conversations
    {"chosen": [messages], "rejected": [messages]}                           the prompt is what both begin with
    {"prompt": "...", "chosen": "...", "rejected": "..."}

Each line becomes two documents of token files, one after the other: the chosen side, then the rejected one. `Pairs`
puts them together again. Answers within the prompt are not learned.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

import numpy as np

from trainer.data.sources.bad_records import BadRecord
from trainer.data.sources.conversations import conversation
from trainer.data.sources.records import Where
from trainer.data.token_files.reader import TokenFiles
from trainer.data.tokenizers.encoders import NOTHING, ConversationEncoder, Encoded

_EXAMPLE = '{"chosen": [{"role": "user", "content": "..."}, ...], "rejected": [...]}'


def preference(content: bytes, where: Where) -> Iterator[dict[str, Any] | BadRecord | str]:
    """Yield both sides of a line as conversations, with the number of answers in their prompt as `answers_before`.

    Or a `BadRecord` that says why the line is no pair, and an empty document.
    """
    try:
        line = json.loads(content)
        sides = list(_sides(line)) if isinstance(line, dict) else []
    except (ValueError, RecursionError, KeyError, TypeError):
        sides = []
    if sides and line["chosen"] == line["rejected"]:
        found: list[Any] = [BadRecord(f"{where()}: chosen and rejected are the same; leave the line out")]
    elif not sides:
        found = [BadRecord(f'{where()}: it has no "chosen" and "rejected" of one kind; write {_EXAMPLE}')]
    else:
        found = [conversation(json.dumps(side).encode(), where) for side, _ in sides]
    if (bad := next((side for side in found if isinstance(side, BadRecord)), None)) is not None:
        yield from (bad, "")
        return
    for side, (_, before) in zip(found, sides, strict=True):
        yield side | {"answers_before": before}


def _sides(line: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the two sides of a line as lines of conversations, each with the number of answers in its prompt."""
    prompt, answers = line.get("prompt"), (line["chosen"], line["rejected"])
    if all(isinstance(answer, str) for answer in answers):
        yield from (({"prompt": prompt, "answer": answer}, 0) for answer in answers)
        return
    if prompt is None:
        prompt = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False))]
        answers = tuple(answer[len(prompt) :] for answer in answers)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    before = sum(message.get("role") == "assistant" for message in prompt)
    for answer in answers:
        yield {"messages": [*prompt, *answer], "tools": line.get("tools")}, before


class PreferenceEncoder(ConversationEncoder):
    """Encodes a side of a pair, of whose answers those in the prompt are not learned."""

    def encode(self, document: Mapping[str, Any]) -> Encoded:
        side = dict(document)
        before = side.pop("answers_before")
        ids, answers, _ = super().encode(side)
        starts = np.flatnonzero(np.diff(answers.astype(np.int8), prepend=0) == 1)
        learned = answers.copy()
        learned[: starts[before] if before < len(starts) else len(ids)] = False
        return Encoded(ids, learned)


class Pairs:
    """Token files whose documents 2 i and 2 i + 1 are the sides of pair i; it is used as `TokenFiles` is."""

    def __init__(self, documents: TokenFiles) -> None:
        self._documents, self.made_by = documents, documents.made_by

    def __len__(self) -> int:
        return len(self._documents) // 2

    def __getitem__(self, i: int) -> Encoded:
        """Return the sides one after the other; nothing if one of them is a bad record. It raises as `TokenFiles`."""
        sides = [self._documents[2 * i + side] for side in range(2)]
        if not all(len(side.ids) for side in sides):
            return NOTHING
        ids, answers = (np.concatenate(column) for column in list(zip(*sides, strict=True))[:2])
        return Encoded(ids, answers, tuple(len(side.ids) for side in sides))

    def fingerprint(self, pairs: int) -> int:
        """Return a 63-bit hash of the content of the first pairs; 0: they end within a file."""
        return self._documents.fingerprint(2 * pairs)
