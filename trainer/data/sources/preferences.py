"""Pairs of answers: lines of JSON with `chosen` and `rejected`, and perhaps a `prompt`. Torch-free.

    {"prompt": [messages], "chosen": [messages], "rejected": [messages]}     messages as of conversations
    {"chosen": [messages], "rejected": [messages]}                           the prompt is what both begin with
    {"prompt": "...", "chosen": "...", "rejected": "..."}

Each line becomes two documents of token files, one after the other: the chosen side, then the rejected one, which are
packed together (`packing/pairs.py`). Answers within the prompt are not learned.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from trainer.config.errors import ConfigError
from trainer.data.sources.bad_records import BadRecord
from trainer.data.sources.conversations import conversation
from trainer.data.sources.records import Where

_EXAMPLE = '{"chosen": [{"role": "user", "content": "..."}, ...], "rejected": [...]}'


def preference(content: bytes, where: Where) -> Iterator[dict[str, Any] | BadRecord | str]:
    """Yield both sides of a line as conversations, in which answers of the prompt have the weight 0.

    Or a `BadRecord` that says why the line is no pair, and an empty document.
    """
    try:
        line = json.loads(content)
        sides = list(_sides(line)) if isinstance(line, dict) else []
    except ConfigError as error:
        yield from (BadRecord(f"{where()}: {error}"), "")
        return
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        sides = []
    if sides and line["chosen"] == line["rejected"]:
        found: list[Any] = [BadRecord(f"{where()}: chosen and rejected are the same; leave the line out")]
    elif not sides:
        found = [BadRecord(f'{where()}: it has no "chosen" and "rejected" of one kind; write {_EXAMPLE}')]
    else:
        found = [conversation(json.dumps(side).encode(), where) for side in sides]
    if (bad := next((side for side in found if isinstance(side, BadRecord)), None)) is not None:
        yield from (bad, "")
        return
    yield from found


def _sides(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the two sides of a line as lines of conversations."""
    prompt, answers = line.get("prompt"), (line["chosen"], line["rejected"])
    if all(isinstance(answer, str) for answer in answers):
        yield from ({"prompt": prompt, "answer": answer} for answer in answers)
        return
    if not all(isinstance(answer, list) for answer in answers):
        raise TypeError("sides of two kinds")
    if prompt is None:
        prompt = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False))]
        answers = tuple(answer[len(prompt) :] for answer in answers)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not all(answers):
        raise ConfigError("the prompt alone is a side of the pair; leave the line out")
    prompt = [message | {"weight": 0} for message in prompt]
    for answer in answers:
        yield {"messages": [*prompt, *answer], "tools": line.get("tools")}
